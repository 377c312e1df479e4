"""Runs: a task under an arm from a seed, in warm worker processes; and the results in git."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
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
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.healbench.code_digest import code_of, code_without_names
from benchmarks.healbench.decision_numbers import applied

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "benchmarks.healbench"
LIMIT_S = 120.0
DONE, ERROR, UNAVAILABLE, TIMEOUT, CRASHED = "done", "error", "unavailable", "timeout", "crashed"


@dataclass(frozen=True)
class Job:
    """The key of a result."""

    framework: str
    task: str
    arm: str
    """A name of the suite, or such a name with a variation: `healer[lr.factor*0.75]`."""
    seed: int


@dataclass(frozen=True)
class Result:
    """The result of one run."""

    framework: str
    task: str
    arm: str
    seed: int
    source: str = ""
    """Digest of the code that the result depends on (`source_of`)."""
    metric: float | None = None
    """None where it is not finite, or where there is none."""
    metric_text: str = ""
    """"nan", "inf" or "-inf" where the metric is not finite."""
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


@functools.cache
def source_of(framework: str, task: str, arm: str) -> str:
    """Digest of the code that decides about a result: the task, the arm, the deciding healcore.

    Comments, docstrings, messages, layout and healcore's own names are not part of the digest.
    """
    there, here = suite(framework), Path(__file__).parent
    made = (there.tasks[task].build, there.arms[arm.partition("[")[0]])
    files = _with_imports({here / "problem.py", here / "training.py"} | _files_of(*made))
    parts = [_code_of(file) for file in sorted(files)]
    policy = inspect.signature(made[1]).parameters.get("policy")
    if policy is not None:
        from healcore.policy import fingerprint, load

        parts += [fingerprint(load(policy.default)), _healcore(framework)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


_code_of = functools.cache(code_of)


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


def _with_imports(files: set[Path]) -> set[Path]:
    """These files, and the files of healbench that they import, packages' `__init__` excluded."""
    found, left = set(), list(files)
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        left += _imports_of(file)
    return found


@functools.cache
def _imports_of(file: Path) -> tuple[Path, ...]:
    """The files of healbench that a file imports."""
    found: list[Path] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
            module = ROOT / str(node.module).replace(".", "/")
            inside = [module / f"{alias.name}.py" for alias in node.names]
            found += [each for each in (module.with_suffix(".py"), *inside) if each.exists()]
    return tuple(found)


DECIDING = (
    "healcore/core",
    "healcore/policy",
    *(f"healcore/runtime/{name}" for name in ("checkpoints", "data", "dominance", "driver")),
    *(f"healcore/runtime/{name}" for name in ("incidents", "loop", "recovery", "store/retention")),
)
"""Files and folders of healcore that decide; those of the adapter are its modules and `driver`."""


@functools.cache
def _healcore(framework: str) -> str:
    adapter = ROOT / "adapters" / framework
    files = {*adapter.glob("*.py"), *(adapter / "driver").rglob("*.py")}
    for part in DECIDING:
        files |= {*(ROOT / part).rglob("*.py"), *ROOT.glob(f"{part}.py")}
    return code_without_names(sorted(files))


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
    base, _, variation = job.arm.partition("[")
    with applied(variation.rstrip("]")) as options:
        problem = there.tasks[job.task].build(job.seed)
        cpu = time.process_time()
        with there.arms[base](problem, **options) as run:
            run.train()
        cpu = time.process_time() - cpu
    metric = float(problem.evaluate())
    finite, counts = math.isfinite(metric), run.counts
    return Result(
        **dataclasses.asdict(job),
        metric=float(f"{metric:.7g}") if finite else None,
        metric_text="" if finite else str(metric),
        clips=int(counts.clips),
        finite_skips=int(counts.finite_skips),
        nonfinite_skips=int(counts.nonfinite_skips),
        lr_cuts=int(counts.lr_cuts),
        lr_scale=float(f"{counts.lr_scale:.4g}"),
        rollbacks=int(counts.rollbacks),
        stopped=str(counts.stopped),
        steps=int(run.steps),
        cpu_s=round(cpu, 2),
    )


def failed(job: Job, status: str, error: str) -> Result:
    """The row of a run without a metric."""
    return Result(**dataclasses.asdict(job), status=status, error=error)


# -- results on disk -----------------------------------------------------------------------------


class Store:
    """The results of a folder: a JSON Lines file for each framework and arm, sorted, in git.

    `write` keeps a result in a file of its own, `merge` moves these files into the sorted ones. A
    command that is killed between the two loses nothing: the next `merge` finds its files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._pending = folder / "pending"
        self._kept = self._load(folder.glob("*/*.jsonl"))
        self._kept.update(self._load(self._pending.glob("*.json")))

    def _load(self, files: Iterable[Path]) -> dict[Job, Result]:
        """The results of the lines that can be read."""
        known = {field.name for field in dataclasses.fields(Result)}
        found = {}
        for file in sorted(files):
            given = {"framework": file.parent.name, "arm": file.stem}
            for line in file.read_text().splitlines():
                with contextlib.suppress(ValueError, TypeError):
                    kept = given | json.loads(line)
                    result = Result(**{key: kept[key] for key in kept if key in known})
                    found[result.job] = result
        return found

    def read(self, job: Job) -> Result | None:
        """The result of a job, or None."""
        return self._kept.get(job)

    def read_all(self, jobs: Iterable[Job]) -> list[Result]:
        """The results of those jobs that have one."""
        return [self._kept[job] for job in jobs if job in self._kept]

    def write(self, result: Result) -> None:
        """Keeps a result in place of an earlier one."""
        self._pending.mkdir(parents=True, exist_ok=True)
        (self._pending / ".gitignore").write_text("*\n")
        job = result.job
        name = f"{job.framework}.{job.task}.{job.arm}.{job.seed}".replace("/", "-")
        temporary = self._pending / f"{name}.{os.getpid()}"
        temporary.write_text(json.dumps(dataclasses.asdict(result), allow_nan=False) + "\n")
        temporary.replace(self._pending / f"{name}.json")
        self._kept[job] = result

    def merge(self) -> None:
        """Writes the sorted files. Results of tasks that no longer exist are dropped."""
        if not self._pending.exists():
            return
        with (self._pending / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            files = sorted(self._pending.glob("*.json"))
            kept = self._load(self.folder.glob("*/*.jsonl")) | self._load(files)
            by_file: dict[Path, list[Result]] = {}
            for result in kept.values():
                if result.task in suite(result.framework).tasks:
                    name = result.arm.partition("[")[0]
                    path = self.folder / result.framework / f"{name}.jsonl"
                    by_file.setdefault(path, []).append(result)
            for path, results in by_file.items():
                path.parent.mkdir(parents=True, exist_ok=True)
                results.sort(key=lambda each: (each.task, each.arm, each.seed))
                temporary = path.with_suffix(".new")
                temporary.write_text("".join(_line(each, path.stem) for each in results))
                temporary.replace(path)
            for file in files:
                file.unlink()


def _line(result: Result, arm: str) -> str:
    """A result as one line of an arm's file, without what is as usual."""
    usual = {field.name: field.default for field in dataclasses.fields(Result)}
    usual |= {"framework": result.framework, "arm": arm}
    values = dataclasses.asdict(result)
    short = {key: value for key, value in values.items() if value != usual[key]}
    return json.dumps(short, allow_nan=False, separators=(",", ":")) + "\n"


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
        # Runs of one task compile the same functions, in each of the workers.
        ours = ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled")}
        os.environ.update(ours)
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, on_interrupt)
            for name in ours:
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
            text = " ".join(output)
            error += f": {text}" if len(text) <= 300 else f": … {text[-300:].partition(' ')[2]}"
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
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
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
