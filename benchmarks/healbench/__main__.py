"""Trains real small models whole, with healcore on and off, in paired seeds.

    python -m benchmarks.healbench [--quick] [--tasks GLOB ...] [--arms NAME ...] [--seeds N]

Results are kept in benchmarks/results/healbench/runs, with a digest of the code that decides. A run
of the present code is not run again; --report shows every kept run. Ctrl-C keeps what is done, and
the same command resumes. The command without a selection, or with --report, writes
docs/healbench.md. The exit status is 0 if the promise holds as far as it could be checked, 1 if
not, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import fnmatch
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.healbench import comparing, table
from benchmarks.healbench.comparing import HINDSIGHT, OFF, fits
from benchmarks.healbench.running import (
    DONE,
    FRAMEWORKS,
    LIMIT_S,
    ROOT,
    Job,
    Result,
    Store,
    run_all,
    source_of,
    suite,
)

RUNS = ROOT / "benchmarks" / "results" / "healbench" / "runs"
PAGE = ROOT / "docs" / "healbench.md"
ARMS = table.MAIN
"""The arms that are run without --arms: the README's own loops and what they are compared with."""
SEEDS = {"torch": 5, "jax": 3}
QUICK_SEEDS = 2


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    asked = _jobs(options, parser)
    store = Store(options.results)
    finished = options.report or run(store, asked, options)
    whole = _selection(options) == ()
    if whole:
        # What was run with --arms is shown too, and is not missing where it was not.
        everything = argparse.Namespace(**{**vars(options), "arms": ["*"]})
        shown = _jobs(everything, parser)
    else:
        shown = (
            asked
            + [dataclasses.replace(job, arm=arm) for job in asked for arm in HINDSIGHT]
            + _references(asked)
        )
    jobs = dict.fromkeys(shown)
    kept = store.read_all(jobs) if options.report else present(store, jobs)
    if not kept:
        print("there are no results")
        return 1 if finished else 130
    there = {result.job for result in kept}
    cells = comparing.compare(kept, _tasks(options.framework))
    rules = comparing.rules(cells)
    print("\n" + table.headline(cells, rules, asked, there & set(asked)))
    if whole:
        page = table.as_markdown(cells, rules, asked, there & set(asked))
        table.write_between(options.page, page)
        print(f"\nwritten: {options.page}")
    return 130 if not finished else 0 if all(rule.holds for rule in rules) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.healbench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help=f"the quick tasks, {QUICK_SEEDS} seeds")
    add("--tasks", nargs="+", metavar="GLOB", help="only tasks or families with such names")
    add("--arms", nargs="+", metavar="NAME", help=f"these (globs too); default: {', '.join(ARMS)}")
    add("--framework", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    add("--seeds", type=int, metavar="N", help=f"default: {SEEDS}")
    add("--report", action="store_true", help="run nothing, only write the tables again")
    add("--again", action="store_true", help="run also what is there")
    add("--failed", action="store_true", help="run again what failed")
    add("--page", type=Path, metavar="FILE", default=PAGE, help=argparse.SUPPRESS)
    add_running(parser, RUNS)
    return parser


def add_running(parser: argparse.ArgumentParser, folder: Path) -> None:
    """The options of `run`."""
    add = parser.add_argument
    add("--jobs", type=int, metavar="N", default=_cores(), help="processes (default: cores)")
    add("--limit", type=float, metavar="SECONDS", default=LIMIT_S, help="for one run (%(default)g)")
    add("--results", type=Path, metavar="DIR", default=folder, help="where runs are kept")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- what to run -----------------------------------------------------------------------------------


def _selection(options: argparse.Namespace) -> tuple[str, ...]:
    """The options that leave something out."""
    part = {
        "--quick": options.quick,
        "--tasks": options.tasks,
        "--arms": options.arms,
        "--seeds": options.seeds,
        "--results": options.results != RUNS and options.page == PAGE,
        "--framework": set(options.framework) != set(FRAMEWORKS),
    }
    return tuple(name for name, given in part.items() if given)


def _tasks(frameworks: Iterable[str]) -> dict[tuple[str, str], object]:
    return {
        (framework, name): task
        for framework in frameworks
        for name, task in suite(framework).tasks.items()
    }


def _jobs(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Job]:
    """The jobs asked for, first seeds first, so that what Ctrl-C leaves can be compared."""
    suites = {framework: suite(framework) for framework in options.framework}
    tasks = options.tasks or ("*",)
    known_tasks = {n for s in suites.values() for t in s.tasks.values() for n in (t.name, t.family)}
    for patterns, names in (
        (options.arms, {name for each in suites.values() for name in each.arms}),
        (options.tasks, known_tasks),
    ):
        for pattern in patterns or ():
            if not fnmatch.filter(names, pattern):
                parser.error(f"{pattern!r} is none of {', '.join(sorted(names))}")
    asked: list[Job] = []
    for seed in range(max(_seeds(options, framework) for framework in suites)):
        for framework, there in suites.items():
            if seed >= _seeds(options, framework):
                continue
            chosen = [
                task
                for task in there.tasks.values()
                if (fits(task.name, tasks) or fits(task.family, tasks))
                and (task.quick or not options.quick)
            ]
            asked += [
                Job(framework, task.name, arm, seed)
                for task in chosen
                for arm in there.arms
                if fits(arm, options.arms or ARMS)
            ]
    return asked if options.arms else list(dict.fromkeys([*asked, *_references(asked)]))


def _references(jobs: Iterable[Job]) -> list[Job]:
    """The undamaged runs that the sick tasks of these jobs are compared with."""
    found = []
    for job in jobs:
        reference = suite(job.framework).tasks[job.task].reference
        if reference:
            off = OFF.get(job.arm, "nothing")
            found.append(Job(job.framework, reference, off, job.seed))
    return list(dict.fromkeys(found))


def _seeds(options: argparse.Namespace, framework: str) -> int:
    return options.seeds or (QUICK_SEEDS if options.quick else SEEDS[framework])


def _source(job: Job) -> str:
    return source_of(job.framework, job.task, job.arm)


def present(store: Store, jobs: Iterable[Job]) -> list[Result]:
    """The results of the present code, of these jobs."""
    return [result for result in store.read_all(jobs) if result.source == _source(result.job)]


def run(store: Store, jobs: Sequence[Job], options: argparse.Namespace) -> bool:
    """Runs what is missing, and merges what there is; False where Ctrl-C ended it."""
    kept = {result.job: result for result in present(store, jobs)}
    again, failed = getattr(options, "again", False), getattr(options, "failed", False)
    done = {job for job, each in kept.items() if not (failed and each.status != DONE)}
    left = [job for job in jobs if again or job not in done]
    print(f"{len(jobs)} runs, {len(left)} of them to do, {options.jobs} at a time", flush=True)
    sources = {job: _source(job) for job in left}
    start, count = time.monotonic(), 0
    try:
        with contextlib.closing(
            run_all(left, workers=options.jobs, limit=options.limit)
        ) as results:
            for result in results:
                store.write(dataclasses.replace(result, source=sources[result.job]))
                count += 1
                rest = (time.monotonic() - start) / count * (len(left) - count)
                time_left = datetime.timedelta(seconds=round(rest))
                print(f"[{count}/{len(left)}, {time_left} left] {_line(result)}", flush=True)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {len(left) - count} runs left, the same command resumes")
        return False
    finally:
        store.merge()
    return True


def _line(result: Result) -> str:
    name = f"{result.framework} {result.task} {result.arm} {result.seed}"
    if result.status != DONE:
        return f"{name}: {result.status}: {result.error}"
    stopped = f", stopped after {result.steps} steps" if result.stopped else ""
    return f"{name}: {result.value:.4g} in {result.cpu_s:.1f} s{stopped}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing stays behind
    sys.exit(main())
