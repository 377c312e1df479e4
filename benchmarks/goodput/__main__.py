"""Simulates the goodput (effective training time ratio, ETTR) of long runs by policy.

    python -m benchmarks.goodput [--quick] [--json FILE] [--figure FILE.png] [--ranks N ...]

What the cluster does is assumed (the options below, each with its source); what healcore does is
measured: how often and how soon each policy notices damage and how often it is wrong
(results/detectors.json, recorded language-model runs), and what a save and a restore cost per byte
(results/rollback.json).
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

import healcore.policy
from benchmarks.goodput.figure import draw
from benchmarks.goodput.simulation import Care, Cluster, Spent, simulate
from benchmarks.side_by_side import arguments, write_json

RESULTS = Path(__file__).resolve().parents[1] / "results"
POLICIES = ("default", "pretraining", "aggressive", "conservative")
DETECTED_AS = {"default": "pretraining"}
"""Policy -> the policy whose detection it is assumed to have. `default` rolls back only if earlier
weights are better, and recorded runs have no weights."""
PERSON = "a person, no policy"
RANKS = (8, 64, 512, 4096, 16_384, 100_000)
INTERVALS = (30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400)
LABELLED = ("llama_8b",)
"""Recorded runs with labelled spikes and one row per step."""
LANGUAGE_MODELS = ("llama_8b", "megatron_golden", "mlperf_other", "modded_nanogpt")


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
    cares = [_person(options), *(_policy(name, options) for name in POLICIES)]
    run = partial(_average, days=options.days, seeds=options.seeds)
    by_ranks, by_interval = [], []
    with ProcessPoolExecutor() as pool:
        for ranks in options.ranks:
            here = dataclasses.replace(cluster, ranks=ranks)
            best = [dataclasses.replace(each, interval_s=young(here, each)) for each in cares]
            by_ranks += [pool.submit(run, here, each) for each in best]
            default = next(each for each in cares if each.name == "default")
            every = [dataclasses.replace(default, interval_s=each) for each in INTERVALS]
            by_interval += [pool.submit(run, here, each) for each in every]
        rows = [each.result() for each in by_ranks]
        intervals = [each.result() for each in by_interval]
    result = {"options": _plain(options), "by_ranks": rows, "by_interval": intervals}
    for table in tables(result).values():
        print("\n".join("| " + " | ".join(row) + " |" for row in table) + "\n")
    print("A save keeps training waiting {:.2f} s, a rollback {:.2f} s.".format(*pauses(result)))
    write_json(options.json, result, "goodput")
    if options.figure:
        draw(rows, intervals, options.figure)
        print(f"written to {options.figure}")


def young(cluster: Cluster, care: Care) -> float:
    """The interval between checkpoints, in seconds, that loses least to crashes (Young 1974)."""
    return max(math.sqrt(2 * care.save_s * cluster.mtbf_s), cluster.step_s)


def _options() -> argparse.Namespace:
    parser = arguments((__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--figure", type=Path, metavar="FILE", help="draw the two pictures of docs/goodput.md")
    add("--ranks", type=int, nargs="+", default=RANKS)
    add("--days", type=float, default=30.0, help="length of a run")
    add("--seeds", type=int, default=20, help="runs that are averaged")
    # 419 unexpected interruptions in 54 days of 16,384 GPUs (Llama 3, arXiv:2407.21783).
    add("--failures-per-rank-day", type=float, default=419 / (54 * 16_384))
    # An assumption. A hang lasts until NCCL's watchdog ends it: in torch 10 minutes by default.
    add("--hang-share", type=float, default=0.1)
    add("--hang-timeout-s", type=float, default=600.0)
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
        noticed=0.0,
        notice_s=0.0,
        rollback_s=_seconds("memory, restore", "MemoryStore.restore", gigabytes),
        person_s=options.person_s,
    )


def _policy(name: str, options: argparse.Namespace) -> Care:
    scores = json.loads((RESULTS / "detectors.json").read_text())["scores"]
    score = scores[f"healcore {DETECTED_AS.get(name, name)}: rollbacks"]
    total = lambda groups, key: sum(score[group][key] for group in groups)  # noqa: E731
    latencies = [score[group]["median_latency"] for group in LABELLED if score[group]["found"]]
    lag = 1  # steps until the host reads a decision
    return dataclasses.replace(
        _person(options),
        name=name,
        noticed=total(LABELLED, "found") / total(LABELLED, "events"),
        notice_s=(max(latencies, default=0) + lag) * options.step_s,
        false_per_step=total(LANGUAGE_MODELS, "false_incidents") / total(LANGUAGE_MODELS, "rows"),
        probation_s=healcore.policy.load(name).rollback.probation * options.step_s,
    )


def _average(cluster: Cluster, care: Care, days: float, seeds: int) -> dict[str, Any]:
    runs = [simulate(cluster, care, days, seed) for seed in range(seeds)]
    useful = [each.useful for each in runs]
    error = statistics.stdev(useful) / math.sqrt(seeds)
    means = {name: statistics.fmean(getattr(each, name) for each in runs) for name in Spent._fields}
    return {
        "policy": care.name,
        "ranks": cluster.ranks,
        "interval_s": care.interval_s,
        **means,
        "standard_error": error,
    }


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    plain = {k: v for k, v in vars(options).items() if not isinstance(v, Path)}
    return plain | {"ranks": list(options.ranks)}


def pauses(result: dict[str, Any]) -> tuple[float, float]:
    """Seconds of a save and of a rollback for which training waits."""
    care = _person(argparse.Namespace(**result["options"]))
    return care.save_s, care.rollback_s


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The tables of docs/goodput.md: `care`, `ranks` and `intervals`, each with its heading."""
    options = argparse.Namespace(**result["options"])
    care = [["policy", "damage noticed", "after", "wrong, per 10k steps", "known-good after"]]
    for each in (_person(options), *(_policy(name, options) for name in POLICIES)):
        noticed, after = f"{each.noticed:.0%}", f"{each.notice_s:.0f} s" if each.noticed else ""
        wrong = f"{each.false_per_step * 1e4:.2f}"
        if each.name == PERSON:
            noticed, after, wrong = "100%", f"{each.person_s:.0f} s", "0"
        care.append([f"`{each.name}`", noticed, after, wrong, f"{each.probation_s:.0f} s"])
    ranks = [["ranks", "policy", "checkpoint every", "goodput", "lost", "saving", "down"]]
    for row in result["by_ranks"]:
        useful = f"{row['useful']:.2%} ± {1.96 * row['standard_error']:.2%}"
        shares = [f"{row[name]:.2%}" for name in ("lost", "saving", "down")]
        every = f"{row['interval_s']:.0f} s"
        ranks.append([f"{row['ranks']:,}", f"`{row['policy']}`", every, useful, *shares])
    intervals = [["ranks", *(f"{each} s" for each in INTERVALS)]]
    for number in sorted({each["ranks"] for each in result["by_interval"]}):
        shares = [each["useful"] for each in result["by_interval"] if each["ranks"] == number]
        intervals.append([f"{number:,}", *(f"{each:.1%}" for each in shares)])
    return {"care": care, "ranks": ranks, "intervals": intervals}


if __name__ == "__main__":
    main()
