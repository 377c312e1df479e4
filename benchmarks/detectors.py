"""Scores healcore's policies on labelled recorded runs.

An alarm is a row at which the whole engine orders a rollback, or would if the budget still paid for
it. Skips (one bad batch) have lines of their own. Alarms are scored by labelled_runs.py.

    python benchmarks/detectors.py [FOLDER] [--json FILE] [--policy NAME|FILE ...]
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from labelled_runs import Run, Score, load, score
from side_by_side import write_json

import healcore.policy
from healcore.core.verdict import Action
from healcore.tools.replay import replay
from healcore.tools.traces import open_traces

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
POLICIES = ("default", "pretraining", "aggressive", "conservative")
Alarms = dict[str, np.ndarray]


def policy_alarms(policy: str, folder: Path, runs: Iterable[Run]) -> tuple[Alarms, Alarms]:
    """Replays a policy on all runs.

    Returns:
        Rows where a rollback is ordered or due, and rows that are skipped, by file.
    """
    due: Alarms = {}
    skipped: Alarms = {}
    for run in runs:
        (trace,), _ = open_traces([str(folder / run.file)])
        judged = replay(trace, policy).judged
        for alarms, flags in (
            (due, judged.action & int(Action.ROLLBACK) != 0),
            (skipped, judged.record.skip),
        ):
            alarms[run.file] = np.zeros(len(run.loss), bool)
            alarms[run.file][judged.index[flags]] = True
    return due, skipped


def all_scores(
    folder: Path, runs: list[Run], policies: Iterable[str]
) -> dict[str, dict[str, Score]]:
    """Scores by kind of alarm and family."""
    scores: dict[str, dict[str, Score]] = {}
    skips: dict[str, dict[str, Score]] = {}
    for name in policies:
        policy = healcore.policy.load(name)
        due, skipped = policy_alarms(name, folder, runs)
        scores[f"healcore {policy.name}: rollbacks"] = score(runs, due)
        skips[f"healcore {policy.name}: skips"] = score(runs, skipped)
    return scores | skips


COLUMNS = (
    ("llama_8b", "Llama-8B"),
    ("algoperf/spiky", "spiky"),
    ("algoperf/calm", "calm"),
    ("algoperf/hard_negative_vit", "hard negatives"),
    ("modded_nanogpt", "nanogpt"),
    ("megatron_golden", "Megatron"),
    ("mlperf_other", "other MLPerf"),
)
"""Families of the public folder and their headings; others follow under their own names."""


def rows_of(scores: dict[str, dict[str, Score]]) -> list[list[str]]:
    """The table: a heading, then one row for each rule."""
    there = {name for families in scores.values() for name in families}
    known = [(name, title) for name, title in COLUMNS if name in there]
    named = {name for name, _ in COLUMNS}
    known += [(name, name.rpartition("/")[2]) for name in sorted(there - named)]
    sizes = {name: _largest(scores, name) for name, _ in known}
    events = [(name, title) for name, title in known if sizes[name].events]
    scored = [(name, title) for name, title in known if sizes[name].rows]
    heading = ["rule"]
    heading += [f"{title}: found / in 10 / median" for _, title in events]
    heading += [f"{title}: false per 10k" for _, title in scored]
    heading += ["first NaN or Inf: rows"]
    table = [heading, ["of"]]
    table[1] += [f"{sizes[name].events} events" for name, _ in events]
    table[1] += [f"{sizes[name].rows:,} rows" for name, _ in scored]
    table[1] += [f"{sum(each.nonfinite_files for each in sizes.values())} files"]
    for rule, families in scores.items():
        cells = [rule]
        for name, _ in events:
            one = families.get(name)
            cells.append(_found(one, sizes[name]) if one and one.events else "-")
        for name, _ in scored:
            one = families.get(name)
            cells.append(f"{one.false_per_10k:.2f}" if one and one.rows else "-")
        table.append([*cells, _first_nonfinite(families.values())])
    return table


def _largest(scores: dict[str, dict[str, Score]], family: str) -> Score:
    """The score of a rule that sees all files of a family: one that needs norms sees fewer."""
    seen = [families[family] for families in scores.values() if family in families]
    return max(seen, key=lambda one: (one.rows, one.nonfinite_files))


def _found(one: Score, full: Score) -> str:
    """Found / within 10 / median latency; of how many, where only some runs have the signal."""
    median = "-" if one.median_latency is None else f"{one.median_latency:g}"
    some = f" of {one.events}" if one.events < full.events else ""
    return f"{one.found}{some} / {one.within_10} / {median}"


def _first_nonfinite(families: Iterable[Score]) -> str:
    """The slowest first alarm after a NaN, over all files; how many files had none at all."""
    families = list(families)
    late = [rows for one in families for rows in one.nonfinite_latencies]
    missed = sum(one.nonfinite_files for one in families) - len(late)
    if not late:
        return "never" if missed else "-"
    return f"at most {max(late)}" + (f", {missed} missed" if missed else "")


def as_markdown(table: list[list[str]]) -> str:
    """A table as in docs/evidence.md."""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    lines.insert(1, "|---" * len(table[0]) + "|")
    return "\n".join(lines)


def as_data(scores: dict[str, dict[str, Score]]) -> dict[str, Any]:
    """Strict JSON: no NaN, None where there is no value."""
    return {
        rule: {
            family: {
                **dataclasses.asdict(one),
                "median_latency": one.median_latency,
                "false_per_10k": round(one.false_per_10k, 4),
            }
            for family, one in families.items()
        }
        for rule, families in scores.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=TRACES, help="has a labels.json")
    parser.add_argument("--policy", action="append", metavar="NAME|FILE", help="instead of all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args()
    if not (options.folder / "labels.json").is_file():
        parser.error(f"{options.folder} has no labels.json: pass a folder of labelled runs")
    scores = all_scores(options.folder, load(options.folder), options.policy or POLICIES)
    table = rows_of(scores)
    print(as_markdown(table))
    write_json(options.json, {"scores": as_data(scores)})


if __name__ == "__main__":
    main()
