"""Runs: a task under an arm from a seed, in worker processes; and the file of the results."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LIMIT_S = 120.0
ATTEMPTS = 3
DONE, ERROR, UNAVAILABLE = "done", "error", "unavailable"


@dataclass(frozen=True)
class Job:
    """The key of a result."""

    framework: str
    task: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    framework: str
    task: str
    arm: str
    seed: int
    metric: float | None = None
    """None where it is not finite, or where there is none."""
    metric_text: str = ""
    """"nan", "inf" or "-inf" where the metric is not finite."""
    weights: str = ""
    """Digest of the weights and buffers at the end of the training."""
    clips: int = 0
    finite_skips: int = 0
    nonfinite_skips: int = 0
    lr_cuts: int = 0
    lr_scale: float = 1.0
    """LR multiplier at the end."""
    rollbacks: int = 0
    stopped: str = ""
    """Reason for which the arm ended the run early, or an empty string."""
    steps: int = 0
    """Iterations taken, undone ones included."""
    evidence: dict[str, float] = field(default_factory=dict)
    """Forward passes and the first rollback of a Healer with a `loss_fn` (`arms/healing.py`)."""
    cpu_s: float = 0.0
    """Processor time of the training alone, without building and evaluation."""
    status: str = DONE
    """DONE, or why there is no metric."""
    error: str = ""

    @property
    def job(self) -> Job:
        """The key of the result."""
        return Job(self.framework, self.task, self.arm, self.seed)

    @property
    def value(self) -> float:
        """The metric as a number, infinite and NaN included; NaN where there is none."""
        return float(self.metric_text or "nan") if self.metric is None else self.metric


# -- what there is to run ------------------------------------------------------------------------


@dataclass(frozen=True)
class Suite:
    """The tasks and arms of one framework."""

    tasks: dict[str, Any]
    arms: dict[str, Any]
    """An arm is called with a problem and gives a `Training`. One that has nothing to work with
    raises an error of the class `Unavailable`."""


FRAMEWORKS = {
    "torch": ("benchmarks.healbench.tasks", "benchmarks.healbench.arms"),
    "jax": ("benchmarks.healbench.jax_tasks", "benchmarks.healbench.jax_tasks"),
}
"""Where the `TASKS` and the `ARMS` of a framework are; one that is not installed has none."""


@functools.cache
def suite(framework: str) -> Suite:
    """Imports the tasks and arms of a framework."""
    tasks, arms = FRAMEWORKS[framework]
    if importlib.util.find_spec(framework) is None:
        return Suite({}, {})
    return Suite(importlib.import_module(tasks).TASKS, importlib.import_module(arms).ARMS)


# -- one run -------------------------------------------------------------------------------------


def run_one(job: Job) -> Result:
    """Trains to the end and evaluates.

    A task and an arm of any framework are used in the same way: `build`, a context manager with
    `train`, `weights`, `counts` and `steps`, `evaluate`.
    """
    there = suite(job.framework)
    random.seed(job.seed)
    np.random.seed(job.seed)  # noqa: NPY002 (arms and packages may draw from it)
    if job.framework == "torch":
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
    problem = there.tasks[job.task].build(job.seed)
    cpu = time.process_time()
    with there.arms[job.arm](problem) as run:
        run.train()
    cpu = time.process_time() - cpu
    weights = hashlib.sha256()
    for part in run.weights():  # before the evaluation, which may deploy a copy of the model
        weights.update(part)
    metric = float(problem.evaluate())
    finite, counts = math.isfinite(metric), run.counts
    return Result(
        **dataclasses.asdict(job),
        metric=metric if finite else None,
        metric_text="" if finite else str(metric),
        weights=weights.hexdigest()[:12],
        clips=int(counts.clips),
        finite_skips=int(counts.finite_skips),
        nonfinite_skips=int(counts.nonfinite_skips),
        lr_cuts=int(counts.lr_cuts),
        lr_scale=float(f"{counts.lr_scale:.4g}"),
        rollbacks=int(counts.rollbacks),
        stopped=str(counts.stopped),
        steps=int(run.steps),
        evidence=dict(counts.evidence),
        cpu_s=round(cpu, 2),
    )


def failed(job: Job, status: str, error: str) -> Result:
    """The row of a run without a metric."""
    return Result(**dataclasses.asdict(job), status=status, error=error)


# -- the file of the results ---------------------------------------------------------------------

_USUAL = {each.name: each.default for each in dataclasses.fields(Result)} | {"evidence": {}}


def read_results(file: Path) -> list[Result]:
    """The results of a file: JSON Lines, a run in a line."""
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()]


def write_results(file: Path, results: Iterable[Result]) -> None:
    """Replaces a file with these results, sorted, without the fields that have their defaults."""
    rows = sorted(results, key=lambda r: (r.framework, r.arm, r.task, r.seed))
    lines = []
    for row in rows:
        values = {k: v for k, v in dataclasses.asdict(row).items() if v != _USUAL[k]}
        lines.append(json.dumps(values, allow_nan=False, separators=(",", ":")) + "\n")
    file.write_text("".join(lines))


# -- many runs -----------------------------------------------------------------------------------

Run = Callable[[Job], Result]
ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Environment of the workers, which share the cores."""


def run_all(
    jobs: Sequence[Job], *, workers: int, limit: float = LIMIT_S, run: Run = run_one
) -> Generator[Result]:
    """Runs jobs side by side. What a worker that dies takes with it is run again.

    Args:
        jobs: what to run, in this order.
        workers: processes.
        limit: seconds after which a run is ended.
        run: a function of a module, so that a worker can import it.

    Yields:
        One result for each job as they end, those that failed included.

    Raises:
        BrokenProcessPool: workers died `ATTEMPTS` times.
    """
    left, attempts = dict.fromkeys(jobs), 0
    with tempfile.TemporaryDirectory(prefix="healbench-") as folder:
        # Runs of one task compile the same functions, in each of the workers.
        os.environ.update(ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"})
        while left:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_silence)
            try:
                for each in as_completed([pool.submit(_guarded, run, j, limit) for j in left]):
                    result = each.result()
                    del left[result.job]
                    yield result
            except BrokenProcessPool:
                attempts += 1
                if attempts == ATTEMPTS:
                    raise
            finally:
                pool.shutdown(cancel_futures=True)


def _silence() -> None:
    """Hides what packages print."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _guarded(run: Run, job: Job, limit: float) -> Result:
    def end(*_: object) -> None:
        raise TimeoutError(f"longer than {limit:g} s")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        return run(job)
    except (Exception, SystemExit) as error:  # `healcore.RunStopped` is a SystemExit
        text = f"{type(error).__name__}: {error}"
        unavailable = type(error).__name__ == "Unavailable"
        return failed(job, UNAVAILABLE if unavailable else ERROR, " ".join(text.split())[:500])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
