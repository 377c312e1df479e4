"""Counts what each variant would have done on all traces, as a table and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore.tools.replay.scores import Score
from healcore.tools.replay.table import ReplayResult

_COUNTS = ("alarms", "incidents", "rollbacks", "skips", "clips")


def rows_of(results: Sequence[ReplayResult]) -> list[dict[str, Any]]:
    """The sums of each variant over its traces, in the order of the variants.

    With labels also `events`, `found`, `in_time`, `latency` (median, rows) and `false` (alarms).
    """
    by_variant: dict[str, list[ReplayResult]] = {}
    for result in results:
        by_variant.setdefault(result.summary.policy, []).append(result)
    rows = []
    for variant, own in by_variant.items():
        row: dict[str, Any] = {"variant": variant, "traces": len(own)}
        for name in ("rows", *_COUNTS):
            row[name] = sum(getattr(each.summary, name) for each in own)
        row["rollbacks"] -= sum(each.summary.repeats for each in own)
        scores = [each.score for each in own if each.score is not None]
        if scores:
            score = functools.reduce(Score.plus, scores)
            row |= {"events": score.events, "found": score.found, "in_time": score.in_time}
            row["latency"] = float(np.median(score.latencies)) if score.latencies else None
            row["false"] = score.false
        rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]], policy: str) -> Table:
    """A table with a line for each variant."""
    found = Table(
        title=Text(f"What variants of {policy} would have done", "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    found.add_column("variant", overflow="fold")
    labelled = any("false" in row for row in rows)
    heads = (*_COUNTS, *(("found", "in time", "latency", "false") if labelled else ()))
    for name in heads:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [f"{row[name]:,}" for name in _COUNTS]
        if "false" in row:
            latency = "-" if row["latency"] is None else f"{row['latency']:g}"
            cells += [f"{row['found']} of {row['events']}", str(row["in_time"]), latency]
            cells += [f"{row['false']:,}"]
        found.add_row(Text(row["variant"]), *cells)
    return found
