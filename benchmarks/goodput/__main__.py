"""Simulates the goodput (effective training time ratio, ETTR) of long runs by policy.

    python -m benchmarks.goodput [--quick] [--json FILE] [--ranks N ...]

The behaviour of the cluster is assumed (the options below, each with its source). The behaviour of
healcore is measured: what each policy does to damaged and to healthy runs (parameters.py), and what
a save and a restore cost per byte (results/rollback.json).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.goodput.parameters import POLICIES, Measured, measure
from benchmarks.goodput.simulation import DAY, Care, Cluster, Spent, simulate
from benchmarks.side_by_side import arguments, write_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
PERSON = "a person, no policy"
RANKS = (8, 64, 512, 4096, 16_384, 100_000)


def main() -> None:
    """Runs the command."""
    options = _options()
    cluster = Cluster(
        ranks=0,
        failures_per_rank_day=options.failures_per_rank_day,
        hang_share=options.hang_share,
        damages_per_day=options.damages_per_day,
        step_s=options.step_s,
        restart_s=options.restart_s,
    )
    measured = [measure(policy) for policy in POLICIES]
    with ProcessPoolExecutor(options.jobs) as pool:
        average = partial(_average, days=options.days, seeds=options.seeds)
        by_ranks = []
        for ranks in options.ranks:
            here = dataclasses.replace(cluster, ranks=ranks)
            cares = (_person(options), *(_policy(each, options) for each in measured))
            by_ranks += [
                pool.submit(average, here, _at_best_interval(here, care)) for care in cares
            ]
        result: dict[str, Any] = {
            "options": _plain(options),
            "parameters": [each._asdict() for each in measured],
            "by_ranks": [each.result() for each in by_ranks],
        }
    for table in tables(result).values():
        print("\n".join("| " + " | ".join(row) + " |" for row in table) + "\n")
    write_json(options.json, result)


def best_interval(cluster: Cluster, save_s: float) -> float:
    """The interval between checkpoints, in seconds, that loses least (Young 1974).

    A crash loses half an interval on average, and so does a damage that a person repairs.
    """
    per_second = cluster.damages_per_day / DAY + 1 / cluster.mtbf_s
    return max(math.sqrt(2 * save_s / per_second), cluster.step_s)


def _at_best_interval(cluster: Cluster, care: Care) -> Care:
    return dataclasses.replace(care, interval_s=best_interval(cluster, care.save_s))


def _options() -> argparse.Namespace:
    parser = arguments((__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=RANKS)
    add("--days", type=float, default=30.0, help="length of a run")
    add("--seeds", type=int, default=20, help="runs that are averaged")
    # 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv:2407.21783).
    add("--failures-per-rank-day", type=float, default=419 / (54 * 16_384))
    # An assumption. A hang lasts until NCCL's watchdog ends it: in torch 10 minutes by default.
    add("--hang-share", type=float, default=0.1)
    add("--hang-timeout-s", type=float, default=600.0)
    # An assumption: a training step is a forward pass, and a backward pass of twice its cost.
    add("--pass-share", type=float, default=1 / 3, help="cost of a forward pass, in steps")
    add("--jobs", type=int, help="processes (default: cores)")
    # About 20 loss spikes in PaLM 540B's training of 64 days (arXiv:2204.02311).
    add("--damages-per-day", type=float, default=20 / 64)
    # Until a NaN was resolved, on average (ByteRobust, arXiv:2509.16293).
    add("--person-s", type=float, default=4289.0)
    # Assumptions: the step of a large language model, the start of a job, the state of one rank.
    add("--step-s", type=float, default=6.0)
    add("--restart-s", type=float, default=600.0)
    add("--gigabytes-per-rank", type=float, default=4.0)
    options = parser.parse_args()
    if options.quick:
        options.days, options.seeds, options.ranks = 3.0, 2, options.ranks[:2]
    return options


def _seconds(what: str, name: str, gigabytes: float) -> float:
    """What one of rollback.json's measurements takes for so many bytes."""
    measured = json.loads((RESULTS / "rollback.json").read_text())
    times = {each["name"].strip(): each["median_ms"] for each in measured["torch"][what]}
    return times[name] / 1e3 * gigabytes * 1e9 / measured["bytes"]


def _person(options: argparse.Namespace) -> Care:
    gigabytes = options.gigabytes_per_rank
    return Care(
        name=PERSON,
        interval_s=0.0,
        save_s=_seconds("memory, save", "MemoryStore.save", gigabytes),
        hang_timeout_s=options.hang_timeout_s,
        restore_s=_seconds("memory, restore", "MemoryStore.restore", gigabytes),
        person_s=options.person_s,
    )


def _policy(measured: Measured, options: argparse.Namespace) -> Care:
    step_s, pass_s = options.step_s, options.pass_share * options.step_s
    return dataclasses.replace(
        _person(options),
        name=measured.policy,
        rolled_back=measured.rolled_back,
        rollbacks=tuple((wait * step_s, undone * step_s) for wait, undone in measured.rollbacks),
        evidence_s=measured.passes_per_rollback * pass_s,
        evidence_share=measured.passes_per_step * options.pass_share,
        needless_per_step=measured.needless_per_step,
        needless_s=measured.needless_steps * step_s,
    )


def _average(cluster: Cluster, care: Care, days: float, seeds: int) -> dict[str, Any]:
    runs = [simulate(cluster, care, days, seed) for seed in range(seeds)]
    useful = [each.useful for each in runs]
    means = {name: statistics.fmean(getattr(each, name) for each in runs) for name in Spent._fields}
    return {
        "policy": care.name,
        "ranks": cluster.ranks,
        "interval_s": care.interval_s,
        **means,
        "each": [round(share, 6) for share in useful],
    }


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    plain = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    return plain | {"ranks": list(options.ranks)}


def gain(row: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Mean of the difference in goodput, and its standard error: the seeds are paired."""
    differences = [one - other for one, other in zip(row["each"], base["each"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.fmean(differences), error


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The tables that docs/evidence.md sums up: `care` and `ranks`, each with its heading."""
    measured = [Measured(**each) for each in result["parameters"]]
    care = [
        [
            "policy",
            "damages rolled back",
            "after, steps",
            "undone, steps",
            "needless per 10k steps",
            "forward passes per 1k steps",
            "per rollback",
        ]
    ]
    for each in measured:
        waits, undone = zip(*each.rollbacks, strict=True) if each.rollbacks else ((), ())
        care.append(
            [
                each.policy,
                f"{each.rolled_back_runs} of {each.damaged_runs}",
                f"{statistics.median(waits):.0f}" if waits else "",
                f"{statistics.median(undone):.0f}" if undone else "",
                f"{each.needless_per_step * 1e4:.2f}",
                f"{each.passes_per_step * 1e3:.0f}",
                f"{each.passes_per_rollback:.0f}",
            ]
        )
    names = list(dict.fromkeys(row["policy"] for row in result["by_ranks"]))
    ranks = [["ranks", PERSON, *(f"{name}" for name in names if name != PERSON)]]
    for number in dict.fromkeys(row["ranks"] for row in result["by_ranks"]):
        rows = {row["policy"]: row for row in result["by_ranks"] if row["ranks"] == number}
        person = rows.pop(PERSON)
        cells = [f"{person['useful']:.2%}", *(_points(gain(row, person)) for row in rows.values())]
        ranks.append([f"{number:,}", *cells])
    return {"care": care, "ranks": ranks}


def _points(difference: tuple[float, float]) -> str:
    mean, error = difference
    return f"{100 * mean:+.2f} ± {196 * error:.2f}"


if __name__ == "__main__":
    main()
