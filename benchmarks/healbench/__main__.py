"""Trains real small models whole, under every arm, in paired seeds, and reports which rules hold.

    python -m benchmarks.healbench [--quick] [--tasks GLOB ...] [--arms NAME ...] [--seeds N]

What has been run is kept and not run again; Ctrl-C leaves it, and the same command goes on. Without
a choice of tasks or arms the tables go to docs/healbench.md and docs/healbench.png and the summary
to benchmarks/results/healbench/summary.json, otherwise all three lie next to the runs. The exit
status is 0 if every rule that could be checked holds, 1 if not, 130 after Ctrl-C.
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
from pathlib import Path

from benchmarks.healbench import comparing, figure, table
from benchmarks.healbench.comparing import CURED, REFERENCES, fits
from benchmarks.healbench.running import (
    DONE,
    FRAMEWORKS,
    LIMIT_S,
    ROOT,
    Job,
    Result,
    Store,
    policy_of,
    run_all,
    source_of,
    suite,
)

RUNS = ROOT / "benchmarks" / "results" / "healbench" / "runs"
QUICK_ARMS = ("nothing", "fixed_clip", "clip_skip_nan", "attach_default", "healer", "healer_ask")
QUICK_SEEDS, SEEDS = 2, 5
AGAIN = ("all", "failed", "changed")


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    jobs, compared = _jobs(options, parser)
    store = Store(options.results)
    interrupted = False if options.report else _run(store, jobs, options)
    kept = [result for job in compared if (result := store.read(job)) is not None]
    if not kept:
        print("there are no results")
        return 130 if interrupted else 1
    changed = sum(_changed(result) for result in kept)
    if changed:
        print(
            f"\n{changed} of {len(kept)} results were made by other sources than these: see --again"
        )
    holds = _report(kept, options)
    return 130 if interrupted else 0 if holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.healbench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the quick tasks, six arms, two seeds: 10 minutes")
    add("--tasks", nargs="+", metavar="GLOB", help="only tasks with such names")
    add("--arms", nargs="+", metavar="NAME", help="only these arms (globs too)")
    add("--framework", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    add("--seeds", type=int, metavar="N", help=f"{SEEDS}; with --quick {QUICK_SEEDS}")
    add("--jobs", type=int, metavar="N", default=_cores(), help="processes (default: cores)")
    add("--limit", type=float, metavar="SECONDS", default=LIMIT_S, help="for one run (%(default)g)")
    add("--results", type=Path, metavar="DIR", default=RUNS, help="where runs are kept")
    add("--report", action="store_true", help="run nothing, only write the tables again")
    add(
        "--again",
        choices=AGAIN,
        nargs="?",
        const="all",
        help="run again what is kept: all of it, what failed, or what other sources have made",
    )
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- what to run -----------------------------------------------------------------------------------


def _jobs(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[list[Job], list[Job]]:
    """The jobs asked for, and those together with the jobs that they are compared with.

    First seeds first, so that what there is after Ctrl-C can be compared. With `--arms` nothing is
    run in addition to them.
    """
    suites = {framework: suite(framework) for framework in options.framework}
    arms = options.arms or (QUICK_ARMS if options.quick else ("*",))
    tasks = options.tasks or ("*",)
    for patterns, names in (
        (options.arms, {name for each in suites.values() for name in each.arms}),
        (options.tasks, {name for each in suites.values() for name in each.tasks}),
    ):
        for pattern in patterns or ():
            if not fnmatch.filter(names, pattern):
                parser.error(f"{pattern!r} is none of {', '.join(sorted(names))}")
    asked: list[Job] = []
    compared: list[Job] = []
    for seed in range(_seeds(options)):
        for framework, there in suites.items():
            for task in there.tasks.values():
                if not fits(task.name, tasks) or (options.quick and not task.quick):
                    continue
                for arm in there.arms:
                    job = Job(framework, task.name, arm, seed, policy_of(framework, arm))
                    if fits(arm, arms):
                        asked.append(job)
                    if fits(arm, (*arms, *REFERENCES[task.kind])):
                        compared.append(job)
                if task.reference:
                    cure = Job(framework, task.reference, CURED, seed, policy_of(framework, CURED))
                    asked += [] if options.arms else [cure]
                    compared.append(cure)
    return list(dict.fromkeys(asked)), list(dict.fromkeys(compared))


def _seeds(options: argparse.Namespace) -> int:
    return options.seeds or (QUICK_SEEDS if options.quick else SEEDS)


def _changed(result: Result) -> bool:
    return result.source != source_of(result.framework, result.task, result.arm)


def _run(store: Store, jobs: list[Job], options: argparse.Namespace) -> bool:
    """Runs what is missing; True where Ctrl-C ended it."""

    def due(job: Job) -> bool:
        kept = None if options.again == "all" else store.read(job)
        if kept is None:
            return True
        failed = options.again == "failed" and kept.status != DONE
        return failed or (options.again == "changed" and _changed(kept))

    left = [job for job in jobs if due(job)]
    print(f"{len(jobs)} runs, {len(left)} of them to do, {options.jobs} at a time", flush=True)
    sources = {job: source_of(job.framework, job.task, job.arm) for job in left}
    start, done = time.monotonic(), 0
    try:
        with contextlib.closing(
            run_all(left, workers=options.jobs, limit=options.limit)
        ) as results:
            for result in results:
                store.write(dataclasses.replace(result, source=sources[result.job]))
                done += 1
                rest = (time.monotonic() - start) / done * (len(left) - done)
                time_left = datetime.timedelta(seconds=round(rest))
                print(f"[{done}/{len(left)}, {time_left} left] {_line(result)}", flush=True)
    except KeyboardInterrupt:
        print(f"\ninterrupted: {len(left) - done} runs left, the same command goes on with them")
        return True
    return False


def _line(result: Result) -> str:
    name = f"{result.framework} {result.task} {result.arm} {result.seed}"
    if result.status != DONE:
        return f"{name}: {result.status}: {result.error}"
    stopped = f", stopped after {result.steps} steps" if result.stopped else ""
    return f"{name}: {result.value:.4g} in {result.wall_s:.1f} s{stopped}"


# -- what it came to -------------------------------------------------------------------------------


def _report(kept: list[Result], options: argparse.Namespace) -> bool:
    """Prints and writes the tables; whether all rules hold."""
    tasks = {
        (framework, name): task
        for framework in options.framework
        for name, task in suite(framework).tasks.items()
        if fits(name, options.tasks or ("*",)) and (task.quick or not options.quick)
    }
    cells = comparing.compare(kept, tasks)
    rules = comparing.rules(cells)
    print("\n" + table.as_text(cells, rules))
    page, picture, summary = _places(options)
    table.write_json(summary, table.as_data(cells, rules))
    # All arms of all frameworks in one picture cannot be read; the tables have them.
    main = [cell for cell in cells if cell.framework == "torch" and cell.arm in QUICK_ARMS]
    figure.draw(main or cells, picture)
    table.write_between(page, table.as_markdown(cells, rules, tasks, picture.name))
    print(f"\nwritten: {summary}, {page}, {picture}")
    broken = sum(not rule.holds for rule in rules)
    unchecked = sum(not rule.checked for rule in rules)
    held = len(rules) - broken - unchecked
    print(f"rules: {held} hold, {broken} do not, {unchecked} not checked")
    return not broken


def _places(options: argparse.Namespace) -> tuple[Path, Path, Path]:
    """Page, picture and summary: those of the docs only of everything there is."""
    part = options.quick or options.tasks or options.arms or options.framework != list(FRAMEWORKS)
    if part or options.results != RUNS:
        names = ("healbench.md", "healbench.png", "summary.json")
        page, picture, summary = (options.results / name for name in names)
    else:
        page, picture = (ROOT / "docs" / name for name in ("healbench.md", "healbench.png"))
        summary = RUNS.parent / "summary.json"
    return page, picture, summary


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing stays behind
    sys.exit(main())
