"""What a policy does to damaged and to healthy runs: measured on the runs of healbench.

The records are in benchmarks/results/healbench.jsonl.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from benchmarks.healbench.__main__ import RESULTS, all_tasks
from benchmarks.healbench.comparing import MARGIN, OFF
from benchmarks.healbench.running import DONE, Job, Result, read_results

STATIONARY = ("stationary", "likelihoods")
"""Families whose data and objective stay the same, without heavy tails."""
POLICIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "`default`, `loss_fn`": ("healer_ask", ()),
    "`default`, `loss_fn`, stationary": ("healer_ask", STATIONARY),
    "`default`": ("healer", ()),
    "`pretraining`": ("healer_pretraining", ()),
    "`pretraining`, stationary": ("healer_pretraining", STATIONARY),
}
"""Name of a policy here -> arm of healbench, and the families of healthy tasks (empty: all)."""


class Measured(NamedTuple):
    """The parameters of one policy. Times are in optimizer steps."""

    policy: str
    damaged_runs: int
    """Runs with a lasting damage: without healcore they end worse than the undamaged run."""
    rolled_back_runs: int
    """Of the damaged runs."""
    rollbacks: list[tuple[int, int]]
    """Steps from the damage to the first rollback, and steps that the rollback undoes."""
    healthy_runs: int
    healthy_steps: int
    needless: int
    """Rollbacks of the healthy runs."""
    needless_steps: float
    """Mean of the steps that a needless rollback undoes, less the steps whose batches it skips, in
    the healthy tasks of all families; 0 without a needless rollback."""
    passes_per_step: float
    """Forward passes for evidence in healthy runs, after the first 500 steps: a long run's rate."""
    passes_per_rollback: float
    """Mean number of forward passes from a damage to its rollback."""

    @property
    def rolled_back(self) -> float:
        """Share of the lasting damages that are rolled back."""
        return self.rolled_back_runs / self.damaged_runs

    @property
    def needless_per_step(self) -> float:
        """Rate of needless rollbacks."""
        return self.needless / self.healthy_steps


def measure(policy: str) -> Measured:
    """Reads the parameters of a key of `POLICIES`. The family "damage" counts as damage."""
    arm, calm = POLICIES[policy]
    runs = list(_runs(arm))
    everything = [(task, run, off) for task, run, off, _ in runs if task.kind == "healthy"]
    healthy = [run for task, run, _ in everything if not calm or task.family in calm]
    undone = [(run.steps - off.steps, run.rollbacks) for _, run, off in everything if run.rollbacks]
    damaged = [
        run
        for task, run, off, undamaged in runs
        if task.family == "damage" and undamaged is not None and _worse(off, undamaged)
    ]
    needless = sum(run.rollbacks for run in healthy)
    steps = sum(run.steps for run in healthy)
    first = [
        run.evidence
        for task, run, *_ in runs
        if task.family == "damage" and "fault" in run.evidence
    ]
    asked = [run.evidence for run in healthy if "later_passes" in run.evidence]
    return Measured(
        policy=policy,
        damaged_runs=len(damaged),
        rolled_back_runs=sum(run.rollbacks > 0 for run in damaged),
        rollbacks=[
            (round(row["rollback"] - row["fault"]), round(row["rollback"] - row["target"]))
            for row in first
        ],
        healthy_runs=len(healthy),
        healthy_steps=steps,
        needless=needless,
        needless_steps=_ratio(undone),
        passes_per_step=_ratio([(each["later_passes"], each["later_steps"]) for each in asked]),
        passes_per_rollback=_ratio([(row["passes_to_rollback"], 1) for row in first]),
    )


def _runs(arm: str) -> Iterable[tuple[Any, Result, Result, Result | None]]:
    """The task, the run, the run without healcore, and the undamaged run without healcore."""
    tasks: dict[tuple[str, str], Any] = all_tasks()
    records = {r.job: r for r in read_results(RESULTS) if (r.framework, r.task) in tasks}
    order = list(tasks)
    for job in sorted(records, key=lambda job: (order.index((job.framework, job.task)), job.seed)):
        task = tasks[job.framework, job.task]
        off, undamaged = (
            records.get(Job(job.framework, name, OFF, job.seed))
            for name in (job.task, task.reference)
        )
        if job.arm == arm and records[job].status == DONE and off is not None:
            yield task, records[job], off, undamaged


def _worse(off: Result, undamaged: Result) -> bool:
    """Whether the damage lasts until the end; a metric that is not finite is worse."""
    return not off.value <= undamaged.value * (1 + MARGIN / 100)


def _ratio(parts: Sequence[tuple[float, float]]) -> float:
    """Sum over sum; 0 without parts."""
    return sum(part for part, _ in parts) / (sum(whole for _, whole in parts) or 1)
