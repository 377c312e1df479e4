"""Trains real small models whole, with healcore on and off, in paired seeds.

    python -m benchmarks.healbench [--quick] [--tasks GLOB ...] [--arms NAME ...] [--seeds N]

The command without a selection writes benchmarks/results/healbench.jsonl, one line for each run,
and docs/healbench.md and .csv. A selection is printed, and written to --results FILE. --report
writes both again. The exit status is 0 if the promise holds as far as checked, else 1.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks.healbench import comparing, table
from benchmarks.healbench.comparing import OFF, OURS
from benchmarks.healbench.running import (
    DONE,
    FRAMEWORKS,
    LIMIT_S,
    Job,
    Result,
    read_results,
    run_all,
    suite,
    write_results,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "healbench.jsonl"
PAGE = ROOT / "docs" / "healbench.md"
SEEDS = {"healthy": 2, "faulty": 3}
"""By kind of task. Arms that are neither on nor off have one seed."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    whole = not (options.quick or options.tasks or options.arms or options.seeds)
    if options.report:
        results = read_results(options.results)
    else:
        jobs = _jobs(options, parser)
        results = _run(jobs, options)
        if whole or options.results != RESULTS:
            write_results(options.results, results)
    cells = comparing.compare(results, all_tasks())
    rules = comparing.rules(cells)
    print("\n" + table.promise(rules) + "\n\n" + table.markdown(table.tasks(cells)))
    if whole:
        table.write_between(options.page, table.as_markdown(cells, rules))
        table.write_tasks(options.page.with_suffix(".csv"), cells)
        print(f"\nwritten: {options.page} and its .csv")
    return 0 if all(rule.holds for rule in rules) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.healbench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the quick tasks, without the peers")
    add("--tasks", nargs="+", metavar="GLOB", help="only tasks or families with such names")
    add("--arms", nargs="+", metavar="GLOB", help="only arms with such names")
    add("--seeds", type=int, metavar="N", help=f"for every arm; default: {SEEDS}, peers 1")
    add("--report", action="store_true", help="run nothing, only write the page again")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--jobs", type=int, metavar="N", default=cores, help="processes (default: cores)")
    add("--limit", type=float, metavar="SECONDS", default=LIMIT_S, help="for one run (%(default)g)")
    add("--results", type=Path, metavar="FILE", default=RESULTS, help="of a selection, too")
    add("--page", type=Path, metavar="FILE", default=PAGE, help=argparse.SUPPRESS)
    return parser


def all_tasks() -> dict[tuple[str, str], object]:
    """The tasks of all frameworks, by framework and name."""
    return {
        (framework, name): task
        for framework in FRAMEWORKS
        for name, task in suite(framework).tasks.items()
    }


def _jobs(options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Job]:
    """The jobs asked for, and the undamaged runs that faulty tasks are compared with."""
    suites = {framework: suite(framework) for framework in FRAMEWORKS}
    names = {n for s in suites.values() for t in s.tasks.values() for n in (t.name, t.family)}
    arms = {name for each in suites.values() for name in each.arms}
    for patterns, known in ((options.arms, arms), (options.tasks, names)):
        for pattern in patterns or ():
            if not fnmatch.filter(known, pattern):
                parser.error(f"{pattern!r} is none of {', '.join(sorted(known))}")
    chosen = options.arms or ((OFF, *OURS) if options.quick else ("*",))
    asked: dict[Job, None] = {}
    for framework, there in suites.items():
        for task in there.tasks.values():
            named = _fits(task.name, options.tasks) or _fits(task.family, options.tasks)
            if not named or (options.quick and not task.quick):
                continue
            for arm in (arm for arm in there.arms if _fits(arm, chosen)):
                peer = arm not in (OFF, *OURS)
                for seed in range(options.seeds or (1 if peer else SEEDS[task.kind])):
                    asked[Job(framework, task.name, arm, seed)] = None
                    if task.reference:
                        asked[Job(framework, task.reference, OFF, seed)] = None
    return list(asked)


def _fits(name: str, patterns: Iterable[str] | None) -> bool:
    """Whether a name fits one of these patterns, or there are none."""
    return patterns is None or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _run(jobs: list[Job], options: argparse.Namespace) -> list[Result]:
    print(f"{len(jobs)} runs, {options.jobs} at a time", flush=True)
    start, results = time.monotonic(), list[Result]()
    for result in run_all(jobs, workers=options.jobs, limit=options.limit):
        results.append(result)
        rest = (time.monotonic() - start) / len(results) * (len(jobs) - len(results))
        time_left = datetime.timedelta(seconds=round(rest))
        print(f"[{len(results)}/{len(jobs)}, {time_left} left] {_line(result)}", flush=True)
    return sorted(results, key=lambda each: jobs.index(each.job))


def _line(result: Result) -> str:
    name = f"{result.framework} {result.task} {result.arm} {result.seed}"
    if result.status != DONE:
        return f"{name}: {result.status}: {result.error}"
    stopped = f", stopped after {result.steps} steps" if result.stopped else ""
    return f"{name}: {result.value:.4g} in {result.cpu_s:.1f} s{stopped}"


if __name__ == "__main__":
    sys.exit(main())
