"""Runs: a task under an arm from a seed, in warm worker processes, one small file per result."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120.0
DONE, ERROR, UNAVAILABLE, TIMEOUT, CRASHED = "done", "error", "unavailable", "timeout", "crashed"


@dataclass(frozen=True)
class Job:
    """The key of a result."""

    framework: str
    task: str
    arm: str
    seed: int
    policy: str = ""
    """Fingerprint of the arm's policy, so that a changed policy runs again; empty: it has none."""


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    framework: str
    task: str
    arm: str
    seed: int
    policy: str = ""
    status: str = DONE
    """DONE, or why there is no metric."""
    metric: float | None = None
    """None where it is not finite, or where there is none."""
    metric_text: str = ""
    """"nan", "inf" or "-inf" where the metric is not finite."""
    clips: int = 0
    finite_skips: int = 0
    nonfinite_skips: int = 0
    lr_cuts: int = 0
    rollbacks: int = 0
    stopped: str = ""
    """Why the arm ended the run early; empty: it did not."""
    steps: int = 0
    """Iterations taken, undone ones included."""
    steps_lost: int = 0
    """Iterations beyond one per batch, or, after a stop, batches that were never reached."""
    wall_s: float = 0.0
    """Seconds of the training alone, without building and evaluation."""
    cpu_s: float = 0.0
    """The same in processor time, for busy machines."""
    error: str = ""
    source: str = ""
    """Digest of the code that the result depends on (`source_of`)."""

    @property
    def job(self) -> Job:
        """The key of the result."""
        return Job(self.framework, self.task, self.arm, self.seed, self.policy)

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


@functools.cache
def policy_of(framework: str, arm: str) -> str:
    """Fingerprint of the policy that an arm is made with: its argument `policy`, if it has one."""
    argument = inspect.signature(suite(framework).arms[arm]).parameters.get("policy")
    if argument is None:
        return ""
    import healcore.policy

    return healcore.policy.fingerprint(healcore.policy.load(argument.default))


@functools.cache
def source_of(framework: str, task: str, arm: str) -> str:
    """Digest of the files that define the task, the arm and, for healcore's arms, healcore."""
    here = Path(__file__).parent
    files = {here / "problem.py", here / "training.py"}
    files |= _files_of(suite(framework).tasks[task].build, suite(framework).arms[arm])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files)))
    if policy_of(framework, arm):
        digest.update(_healcore(framework))
    return digest.hexdigest()[:16]


def _files_of(*things: Any) -> set[Path]:
    """The modules in which functions and classes, or those under a `partial`, are defined."""
    found = set()
    for thing in things:
        if isinstance(thing, functools.partial):
            given = (*thing.args, *thing.keywords.values())
            found |= _files_of(thing.func, *(each for each in given if callable(each)))
            continue
        module = sys.modules.get(getattr(thing, "__module__", type(thing).__module__))
        if module is not None and getattr(module, "__file__", None):
            found.add(Path(str(module.__file__)))
    return found


@functools.cache
def _healcore(framework: str) -> bytes:
    """Digest of the parts of healcore that run in training, without the tools."""
    parts = ("healcore/core", "healcore/policy", "healcore/runtime", f"adapters/{framework}")
    files = sorted(file for part in parts for file in (ROOT / part).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).digest()


# -- one run -------------------------------------------------------------------------------------


def run_one(job: Job) -> Result:
    """Trains to the end and evaluates.

    A task and an arm of any framework are used in the same way: `build`, a context manager with
    `train`, `counts` and `steps`, `evaluate`.
    """
    there = suite(job.framework)
    random.seed(job.seed)
    np.random.seed(job.seed)  # noqa: NPY002 (arms and packages may draw from it)
    if job.framework == "torch":
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(job.seed)
    problem = there.tasks[job.task].build(job.seed)
    start, cpu = time.perf_counter(), time.process_time()
    with there.arms[job.arm](problem) as run:
        run.train()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    metric = float(problem.evaluate())
    finite, counts = math.isfinite(metric), run.counts
    return Result(
        **dataclasses.asdict(job),
        metric=metric if finite else None,
        metric_text="" if finite else str(metric),
        clips=int(counts.clips),
        finite_skips=int(counts.finite_skips),
        nonfinite_skips=int(counts.nonfinite_skips),
        lr_cuts=int(counts.lr_cuts),
        rollbacks=int(counts.rollbacks),
        stopped=str(counts.stopped),
        steps=int(run.steps),
        steps_lost=abs(run.steps - len(problem.batches)),
        wall_s=round(wall, 3),
        cpu_s=round(cpu, 3),
    )


def failed(job: Job, status: str, error: str) -> Result:
    """The row of a run without a metric."""
    return Result(**dataclasses.asdict(job), status=status, error=error)


# -- results on disk -----------------------------------------------------------------------------


class Store:
    """A folder of results. Files are written atomically."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, job: Job) -> Path:
        """The file of a job's result."""
        name = ".".join(part for part in (job.arm, job.policy, str(job.seed)) if part)
        return self.folder / job.framework / job.task / f"{name}.json"

    def read(self, job: Job) -> Result | None:
        """The result of a job; None where there is none that can be read."""
        known = {field.name for field in dataclasses.fields(Result)}
        try:
            kept = json.loads(self.path(job).read_text())
            return Result(**{key: value for key, value in kept.items() if key in known})
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def write(self, result: Result) -> None:
        """Keeps a result, in place of the one before it."""
        path = self.path(result.job)
        path.parent.mkdir(parents=True, exist_ok=True)
        ignored = self.folder / ".gitignore"
        if not ignored.exists():
            ignored.write_text("*\n")
        text = json.dumps(dataclasses.asdict(result), allow_nan=False)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        temporary.write_text(text + "\n")
        temporary.replace(path)


# -- many runs -----------------------------------------------------------------------------------

Run = Callable[[Job], Result]


def run_all(
    jobs: Sequence[Job], *, workers: int, limit: float = LIMIT_S, run: Run = run_one
) -> Generator[Result, None, None]:
    """Runs jobs side by side, each worker one after the other.

    Args:
        jobs: what to run, in this order.
        workers: processes.
        limit: seconds after which a run's process is killed.
        run: a function of a module, so that a worker can import it.

    Yields:
        One result for each job as they end, those that failed included.

    Raises:
        RuntimeError: a worker cannot even be started.
    """
    left = deque(jobs)
    with tempfile.TemporaryDirectory(prefix="healbench-") as folder:
        crew: list[_Worker] = []
        try:
            for number in range(min(workers, len(jobs))):
                crew.append(_Worker(run, limit, Path(folder, str(number))))
            while left or any(worker.job for worker in crew):
                for worker in crew:
                    if left and worker.idle:
                        worker.give(left.popleft())
                seconds = min(worker.seconds_left for worker in crew)
                wait([worker.pipe for worker in crew], max(0.0, seconds))
                for worker in crew:
                    result = worker.look()
                    if result is not None:
                        yield result
        finally:
            for worker in crew:
                worker.end()


class _Worker:
    """A worker process, replaced by a new one where it dies or hangs."""

    def __init__(self, run: Run, limit: float, folder: Path) -> None:
        self.run, self.limit, self.folder = run, limit, folder
        folder.mkdir()
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.run, self.folder))
        self.process.daemon = True
        # Both are inherited: one thread from the first import on, and Ctrl-C is for us alone.
        variables = dict(os.environ)
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.update(ENVIRONMENT)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
            for name in ENVIRONMENT:
                if name in variables:
                    os.environ[name] = variables[name]
                else:
                    del os.environ[name]
        theirs.close()
        self.job: Job | None = None
        self.ready = False
        self.until = time.monotonic() + LIMIT_S

    @property
    def idle(self) -> bool:
        """Whether it waits for a job."""
        return self.ready and self.job is None

    @property
    def seconds_left(self) -> float:
        """Until the time of its run, or of its start, is over."""
        return LIMIT_S if self.idle else self.until - time.monotonic()

    def give(self, job: Job) -> None:
        """The next run. A process that died meanwhile is noticed by `look`."""
        self.job, self.until = job, time.monotonic() + self.limit
        with contextlib.suppress(OSError):
            self.pipe.send(job)

    def look(self) -> Result | None:
        """The result of its run, if there is one by now."""
        try:
            if self.pipe.poll():
                result = self.pipe.recv()
                self.ready, self.job = True, None
                return result
        except (EOFError, OSError):
            self.process.join(10.0)
            return self._replace(CRASHED, f"the process ended with {self.process.exitcode}")
        if self.seconds_left > 0:
            return None
        return self._replace(TIMEOUT, f"longer than {self.limit:g} s")

    def _replace(self, status: str, error: str) -> Result | None:
        job, log = self.job, self.folder / "log"
        output = log.read_text(errors="replace").split() if log.exists() else []
        if status == CRASHED and output:
            error += ": " + " ".join(output)[-300:]
        self.end()
        if not self.ready:
            raise RuntimeError(f"a worker does not start ({status}): {error}")
        self._start()
        return None if job is None else failed(job, status, error)

    def end(self) -> None:
        """Kills the process: between two runs there is nothing to save."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


ENVIRONMENT = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}
"""Environment of the workers, which share the cores."""


def _work(pipe: Connection, run: Run, folder: Path) -> None:
    """The loop of a worker. What packages print goes to a file, temporary files to its folder."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    pipe.send(None)
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the parent is gone
            return
        os.truncate(log, 0)
        pipe.send(_guarded(run, job))


def _guarded(run: Run, job: Job) -> Result:
    try:
        return run(job)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        unavailable = type(error).__name__ == "Unavailable"
        return failed(job, UNAVAILABLE if unavailable else ERROR, " ".join(text.split())[:500])
