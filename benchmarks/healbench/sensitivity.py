"""How much each number matters: every number of the policy times 0.75 and 1.25, one at a time.

    python -m benchmarks.healbench.sensitivity [--numbers GLOB ...] [--tasks NAME ...] [--seeds N]

Results are kept as those of healbench are. The table goes to docs/healbench.md.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.healbench import table
from benchmarks.healbench.__main__ import PAGE, RUNS, add_running, present, run
from benchmarks.healbench.comparing import (
    CAP,
    difference,
    fits,
    geometric_mean,
    metrics_of,
    percent,
)
from benchmarks.healbench.decision_numbers import Number, changed, numbers
from benchmarks.healbench.running import DONE, Job, Result, Store, suite

FACTORS = (0.75, 1.25)
ARMS = ("attach_default", "healer", "healer_ask")
SEEDS = 2
TASKS = (
    *("lm_bytes", "targets_grow_10000x", "unit_of_inputs_30x", "loud_15pct", "horizon_doubled"),
    *("quantized_once", "full_batch", "rate_raised", "rare_class_60", "policy_gradient_rising"),
    *("lr_10x", "jump_30x", "window_20_100x", "bit_flip_weight", "layer_50x", "slow_damage"),
    *("shard_40", "bad_shard_15", "nan_burst"),
)
"""Healthy tasks of ten families and faults of all kinds, the quicker ones of each."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.healbench.sensitivity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--numbers", nargs="+", metavar="GLOB", default=["*"], help="only numbers with such names")
    add("--tasks", nargs="+", metavar="NAME", default=list(TASKS), choices=suite("torch").tasks)
    add("--arms", nargs="+", metavar="NAME", default=list(ARMS), choices=ARMS)
    add("--seeds", type=int, metavar="N", default=SEEDS)
    add("--report", action="store_true", help="run nothing, only write the table again")
    add("--page", type=Path, metavar="FILE", default=PAGE, help=argparse.SUPPRESS)
    add_running(parser, RUNS.parent / "sensitivity")
    options = parser.parse_args(arguments)
    chosen = [each for each in numbers() if fits(each.name, options.numbers)]
    if not chosen:
        parser.error(f"no number has such a name: {', '.join(options.numbers)}")
    variations = ["", *(f"[{each.name}*{factor:g}]" for each in chosen for factor in FACTORS)]
    jobs = [
        Job("torch", task, arm + variation, seed)
        for variation in variations
        for seed in range(options.seeds)
        for task in options.tasks
        for arm in options.arms
    ]
    store = Store(options.results)
    finished = options.report or run(store, jobs, options)
    text = as_markdown(chosen, present(store, jobs), len(jobs))
    print("\n" + text)
    table.write_between(options.page, text, "sensitivity")
    return 0 if finished else 130


def as_markdown(chosen: Sequence[Number], results: Sequence[Result], asked: int) -> str:
    """One row for each number.

    Args:
        chosen: the numbers.
        results: with and without variations.
        asked: how many there are when all has been run.
    """
    rows = [["number", "value"]]
    for factor in FACTORS:
        rows[0] += [f"× {factor:g}", "healthy: worst", "rollbacks", "sick"]
    by_arm: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        by_arm.setdefault((result.task, result.arm), []).append(result)
    plain = {key: each for key, each in by_arm.items() if "[" not in key[1]}
    for number in chosen:
        row = [f"`{number.name}`", f"{number.value:g}"]
        for factor in FACTORS:
            variation = f"[{number.name}*{factor:g}]"
            pairs = {
                key: (by_arm[key[0], key[1] + variation], usual)
                for key, usual in plain.items()
                if (key[0], key[1] + variation) in by_arm
            }
            row += [f"{changed(number.value, factor):g}", *_effect(pairs)]
        rows.append(row)
    return (
        f"**{len(results):,} of {asked:,} runs have a result.** *Healthy*: the largest "
        "mean difference from the unchanged policy, with its task and arm. *Rollbacks*: change in "
        "the number of healthy runs that are rolled back. *Sick*: geometric mean of the ratio of "
        f"the metric to the unchanged policy's metric, at most {CAP:g} in a task.\n\n"
        + table.markdown(rows)
        + "\n"
    )


def _effect(pairs: dict[tuple[str, str], tuple[list[Result], list[Result]]]) -> list[str]:
    """The cells of one variation: worst healthy task, rollbacks, sick tasks."""
    if not pairs:
        return ["", "", ""]
    tasks = suite("torch").tasks
    healthy, ratios, rollbacks = [], [], 0
    for (task, arm), (varied, usual) in pairs.items():
        refused = next((each.error for each in varied if each.status != DONE), "")
        if refused:
            return ["not allowed" if "PolicyError" in refused else refused[:60], "", ""]
        ours, theirs = metrics_of(varied), metrics_of(usual)
        if tasks[task].kind == "healthy":
            healthy.append((difference(ours, theirs).percent, task, arm))
            more = [sum(each.rollbacks > 0 for each in runs) for runs in (varied, usual)]
            rollbacks += more[0] - more[1]
        else:
            for seed in ours.keys() & theirs.keys():
                ratio = ours[seed] / theirs[seed] if theirs[seed] else math.nan
                ratios.append(min(max(ratio, 1 / CAP), CAP) if ratio < math.inf else CAP)
    worst = max((each for each in healthy if not math.isnan(each[0])), default=None)
    return [
        f"{percent(worst[0])} ({worst[1]}, {worst[2]})" if worst else "",
        f"{rollbacks:+d}" if healthy else "",
        f"× {geometric_mean(ratios):.3f}" if ratios else "",
    ]


if __name__ == "__main__":
    sys.exit(main())
