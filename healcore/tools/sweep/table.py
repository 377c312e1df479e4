"""Counts what each variant would have done on all traces, as a table and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore.policy import Policy
from healcore.tools.replay import ReplayError, Summary, replay
from healcore.tools.sweep.scores import Label, Score, label_of, order_rows, score
from healcore.tools.traces import Trace, Unreadable

_COUNTS = ("alarms", "incidents", "rollbacks", "skips", "clips")


def rows_of(
    traces: Sequence[Trace],
    settings: Mapping[str, Policy],
    labels: Sequence[Label],
    failed: list[Unreadable],
) -> Iterator[dict[str, Any]]:
    """Yields the sums of each variant over the traces; `failed` collects the other traces.

    With labels also `events`, `found`, `in_time`, `latency` (median, rows) and `false` (alarms).
    """
    for name, policy in settings.items():
        summaries: list[Summary] = []
        scores: list[Score] = []
        for trace in traces:
            try:
                result = replay(trace, policy, name=name)
            except ReplayError as error:
                failed.append(Unreadable(trace.name, error.problem))
                continue
            summaries.append(result.summary)
            label = label_of(labels, trace.name)
            if label is not None:
                orders = order_rows(result.judged, result.engine.config)
                found = score(orders, _nonfinite(trace), label)
                scores += [found] if found is not None else []
        if not summaries:
            continue
        row: dict[str, Any] = {"variant": name, "traces": len(summaries)}
        for key in ("rows", *_COUNTS):
            row[key] = sum(getattr(each, key) for each in summaries)
        row["rollbacks"] -= sum(each.repeats for each in summaries)
        if scores:
            total = functools.reduce(Score.plus, scores)
            row |= {"events": total.events, "found": total.found, "in_time": total.in_time}
            row["latency"] = float(np.median(total.latencies)) if total.latencies else None
            row["false"] = total.false
        yield row


def _nonfinite(trace: Trace) -> np.ndarray:
    """Returns the rows without a finite loss; none in a trace without losses."""
    loss = trace.rows.values.get("loss")
    return trace.rows.index[:0] if loss is None else trace.rows.index[~np.isfinite(loss)]


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
