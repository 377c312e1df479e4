"""Counts what healbench's records lack: when a Healer rolls back, and its forward passes.

    python -m benchmarks.recoveries [--quick] [--json FILE]

Repeats runs of benchmarks/healbench in torch, and counts the calls of the `loss_fn`: the damaged
runs that are rolled back according to their records, and healthy runs of one seed. `iterations` and
`rollbacks` of a row are equal to the record. Other counts are of optimizer steps.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import healcore
from benchmarks.healbench.__main__ import RUNS, SEEDS
from benchmarks.healbench.arms.healing import Healed
from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.running import Job, Store, suite
from benchmarks.side_by_side import arguments, write_json

ARMS: dict[str, dict[str, Any]] = {
    "healer_ask": {"policy": "default", "ask": True},
    "healer": {"policy": "default"},
    "healer_pretraining": {"policy": "pretraining"},
}
"""Arm of healbench -> arguments of its class `Healed`."""
FAMILY = "damage"
"""Faults that change weights or moments, and then end."""
START = 500
"""Steps in which a run may spend the evaluations that it starts with."""


class Watched(Healed):
    """The arm `Healed`, with the losses of the run and the calls of its `loss_fn`."""

    def __init__(self, problem: Problem, **options: Any) -> None:
        self.passes = 0
        """Forward passes that the Healer has made so far."""
        self.losses: list[float] = []
        """Training losses in the order of the updates, undone updates included."""
        self.passes_before: list[int] = []
        """`passes` before each of these updates."""
        if problem.loss_fn is not None:
            problem.loss_fn = self._counted(problem.loss_fn)
        super().__init__(problem, **options)

    def _counted(self, loss_fn: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        @functools.wraps(loss_fn)
        def counted(batch: Any) -> Tensor:
            self.passes += 1
            return loss_fn(batch)

        return counted

    @property
    def healer(self) -> healcore.Healer:
        """The Healer of the run."""
        return self._healer

    def before_backward(self, loss: Tensor, optimizer: str) -> None:
        """Keeps the loss, then reports it."""
        self.losses.append(float(loss.detach()))
        self.passes_before.append(self.passes)
        super().before_backward(loss, optimizer)


def watched(task: Task, arm: str, seed: int) -> Watched:
    """Trains to the end, from the same random state as `benchmarks.healbench.running.run_one`."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (arms and packages may draw from it)
    torch.manual_seed(seed)
    run = Watched(task.build(seed), **ARMS[arm])
    with run:
        run.train()
    return run


def main() -> None:
    """Runs the command."""
    options = arguments((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    seeds = 1 if options.quick else SEEDS["torch"]
    result = {"rollbacks": list(_rollbacks(seeds)), "healthy": list(_healthy(options.quick))}
    write_json(options.json, result, "recoveries")


def _rollbacks(seeds: int) -> Iterator[dict[str, Any]]:
    """The first rollback of each damaged run that is rolled back according to its record."""
    store, tasks = Store(RUNS), suite("torch").tasks
    references: dict[tuple[str, str, int], Watched] = {}
    for task in (task for task in tasks.values() if task.family == FAMILY):
        for arm, seed in itertools.product(ARMS, range(seeds)):
            recorded = store.read(Job("torch", task.name, arm, seed))
            if recorded is None or not recorded.rollbacks:
                continue
            key = (task.reference, arm, seed)
            if key not in references:
                references[key] = watched(tasks[task.reference], arm, seed)
            run = watched(task, arm, seed)
            yield _printed(_identity(task, arm, seed, run) | _first(run, references[key]))


def _healthy(quick: bool) -> Iterator[dict[str, Any]]:
    """The forward passes of each healthy task that has a `loss_fn`, and those after its start."""
    for task in suite("torch").tasks.values():
        if task.kind == "healthy" and (task.quick or not quick):
            run = watched(task, "healer_ask", seed=0)
            if run.problem.loss_fn is not None:
                size = _micro_batches(run)
                before = [*run.passes_before, run.passes][min(round(START * size), run.steps)]
                counts = {
                    "forward_passes": run.passes / size,
                    "later_passes": (run.passes - before) / size,
                    "later_steps": max(0.0, run.steps / size - START),
                }
                yield _printed(_identity(task, "healer_ask", 0, run) | counts)


def _identity(task: Task, arm: str, seed: int, run: Watched) -> dict[str, Any]:
    return {
        "task": task.name,
        "arm": arm,
        "seed": seed,
        "iterations": run.steps,
        "rollbacks": run.counts.rollbacks,
        "steps": run.healer.step,
    }


def _printed(row: dict[str, Any]) -> dict[str, Any]:
    print(row, flush=True)
    return row


def _micro_batches(run: Watched) -> float:
    """Iterations of an optimizer step in a run without rollbacks."""
    return max(1.0, run.steps / run.healer.step)


def _first(run: Watched, undamaged: Watched) -> dict[str, Any]:
    """Where the damage shows first, and the first rollback.

    `forward_passes` are counted between the two, in forward passes over the batch of a step.
    """
    back = run.healer.report().rollbacks[0]
    pairs = zip(run.losses, undamaged.losses, strict=False)
    fault = next(k for k, (one, other) in enumerate(pairs) if one != other)
    size = _micro_batches(undamaged)
    passes = [*run.passes_before, run.passes]
    found = (passes[min(round(back.step * size), len(run.losses))] - passes[fault]) / size
    return {
        "fault": int(fault / size),
        "rollback": back.step,
        "target": back.target,
        "forward_passes": found,
    }


if __name__ == "__main__":
    main()
