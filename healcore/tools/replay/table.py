"""Builds the tables of `healcore replay`, and the text below them."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from healcore.runtime.postmortem.sentences import listed
from healcore.tools.replay.scores import IN_TIME_ROWS, ROLLBACKS, Label, Score
from healcore.tools.replay.summary import Summary, inactive_line
from healcore.tools.report.run_report import RunReport

DROPPED_FIRST = ("clips", "last", "first", "skips", "lowest LR", "rows", "alarms")
"""Columns that a narrow terminal does not show, in the order in which they are dropped."""

_COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")
_HEADS = (*_COUNTS, "lowest LR", "first", "last", "ends at")
_MIN_NAME_WIDTH = 16
"""Smallest width of the names of traces, in columns."""
_MAX_NAMED = 4
"""With more policies, the title has their number instead of their names."""

SCORED = (
    f"found: labelled events with such an order (in time: within {IN_TIME_ROWS} rows). "
    "false: other orders; orders within 40 rows count once. latency: median."
)

_MAX_ATTEMPTS = 8
"""Number of attempts whose counts are printed."""


class ReplayResult(NamedTuple):
    """One trace under one policy."""

    summary: Summary
    backend: str
    order_kind: str
    """Kind of order that is scored: rollbacks, stops, skips or alarms."""
    label: Label | None
    score: Score | None
    report: RunReport | None


def summary_table(results: Sequence[ReplayResult], *, width: int) -> Table:
    """Builds a table with a row for each trace and policy, and the sums over several traces."""
    policies = list(dict.fromkeys(result.summary.policy for result in results))
    labelled = any(result.label for result in results)
    folder = _common_folder([result.summary.trace for result in results])
    names, rows, sums = [], [], []
    for place, result in enumerate(results):
        summary = result.summary
        repeated = place > 0 and results[place - 1].summary.trace == summary.trace
        names.append("" if repeated else summary.trace[len(folder) :])
        cells = _cells([result], labelled=labelled)
        rows.append([Text(summary.policy), *([""] if repeated else cells[:1]), *cells[1:]])
    if len({result.summary.trace for result in results}) > 1:
        for policy in policies:
            own = [result for result in results if result.summary.policy == policy]
            sums.append([Text(policy), *_cells(own, labelled=labelled)])
    heads = ["policy", *_HEADS, *(("found", "false") if labelled else ())]
    if len(policies) == 1:
        heads, rows, sums = heads[1:], [row[1:] for row in rows], [row[1:] for row in sums]
    shown, name_width = _fit_columns(heads, [*rows, *sums], width)
    subject = f"{len(policies)} policies" if len(policies) > _MAX_NAMED else listed(policies)
    table = _empty_table(f"What {subject} would have done" + (f", in {folder}" if folder else ""))
    table.add_column("trace", no_wrap=True)
    missing = [heads[place] for place in range(len(heads)) if place not in shown]
    if missing:
        table.caption = f"A wider terminal also shows {listed(missing)}."
        table.caption_justify = "left"
    for name in (heads[place] for place in shown):
        table.add_column(
            name,
            justify="left" if name == "policy" else "right",
            no_wrap=True,
            style="red" if name == "ends at" else "",
        )
    for name, row in zip(names, rows, strict=True):
        table.add_row(Text(_shorten(name, name_width)), *(row[place] for place in shown))
    if sums:
        table.add_section()
    for row in sums:
        name = f"all {len(results) // len(policies)}"
        table.add_row(name, *(row[place] for place in shown), style="bold")
    return table


def score_table(results: Sequence[ReplayResult]) -> Table:
    """Builds a table of scores by folder and policy, without traces that are too short."""
    table = _empty_table("Orders against the labels")
    for name in ("folder", "policy", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("traces", "rows", "found", "in time", "latency", "false", "per 10,000 rows"):
        table.add_column(name, justify="right", no_wrap=True)
    scores: dict[tuple[str, str, str], Score] = {}
    for result in results:
        if result.score is not None and result.label is not None:
            key = (
                str(PurePath(result.label.file).parent),
                result.summary.policy,
                result.order_kind,
            )
            scores[key] = scores.get(key, Score()).plus(result.score)
    for (folder, policy, order_kind), score in sorted(scores.items()):
        table.add_row(
            Text(folder),
            Text(policy),
            order_kind,
            f"{score.traces:,}",
            f"{score.rows:,}",
            f"{score.found} of {score.events}" if score.events else "-",
            f"{score.in_time}" if score.events else "-",
            f"{np.median(score.latencies):g}" if score.latencies else "-",
            _count(score.false, "red"),
            f"{score.false_rate:.2f}",
        )
    return table


def _cells(results: Sequence[ReplayResult], *, labelled: bool) -> list[str | Text]:
    """Returns the cells of one result, or the sums of several results, below `_HEADS`."""
    summaries = [result.summary for result in results]
    cuts = sum(each.first_cuts for each in summaries)
    first = last = ""
    ended = sum(each.stopped_step is not None for each in summaries)
    end = f"{ended} end" if ended else "-"
    if len(summaries) == 1:
        (summary,) = summaries
        first = _step(summary.first_incident)
        last = _step(summary.last_incident if summary.incidents > 1 else None)
        end = _step(summary.stopped_step)
    cells: list[str | Text] = [
        f"{sum(each.rows for each in summaries):,}",
        _count(sum(each.alarms for each in summaries), "yellow"),
        _count(sum(each.incidents for each in summaries), "yellow"),
        _rollbacks(summaries),
        _count(sum(each.skips for each in summaries)),
        _count(sum(each.clips for each in summaries)),
        f"{min(each.lowest_lr_first for each in summaries):.3g} ({cuts})" if cuts else "-",
        first,
        last,
        end,
    ]
    scores = [result.score for result in results if result.score is not None]
    if labelled and not scores:
        cells += ["", ""]
    elif labelled:
        score = functools.reduce(Score.plus, scores)
        by = "" if results[0].order_kind == ROLLBACKS else f" by {results[0].order_kind}"
        found = f"{score.found} of {score.events}{by}" if score.events else "-"
        missed = score.found < score.events
        cells += [Text(found, "red" if missed else ""), _count(score.false, "red")]
    return cells


def _fit_columns(
    heads: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int
) -> tuple[list[int], int]:
    """Returns the columns that fit without truncation, and the width for the names of traces."""
    shown = list(range(len(heads)))
    droppable = [heads.index(name) for name in DROPPED_FIRST]
    while True:
        widths = (max(cell_len(str(row[place])) for row in (heads, *rows)) for place in shown)
        room = width - sum(widths) - 2 * len(shown) - 4
        if room >= _MIN_NAME_WIDTH or not droppable:
            return shown, max(room, _MIN_NAME_WIDTH)
        shown.remove(droppable.pop(0))


def _empty_table(title: str) -> Table:
    return Table(
        title=Text(title, "bold"),
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _count(count: int, style: str = "") -> Text:
    return Text(f"{count:,}", style) if count else Text("-", "dim")


def _rollbacks(summaries: Sequence[Summary]) -> Text:
    due = sum(each.rollbacks for each in summaries)
    repeats = sum(each.repeats for each in summaries)
    spent = sum(each.spent for each in summaries)
    if not due:
        return Text("-", "dim")
    cell = Text(f"{due - repeats:,}", "yellow")
    if repeats:
        cell.append(f" +{repeats:,} again", "dim")
    if spent:
        cell.append(f" ({spent:,} denied)", "red")
    return cell


def _step(step: float | None) -> str:
    return "-" if step is None else f"{step:.15g}"


def _common_folder(traces: Sequence[str]) -> str:
    """Returns the common folder of all traces with a final slash, or an empty string."""
    folders = [os.path.dirname(trace) for trace in set(traces)]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    shared = os.path.commonpath(folders)
    return shared and shared.rstrip(os.sep) + os.sep


def _shorten(name: str, width: int) -> str:
    """Shortens a name in its middle, because names of runs differ at both ends."""
    if len(name) <= width:
        return name
    head = (width - 1) // 3
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def legend(results: Sequence[ReplayResult]) -> str:
    """Explains the columns that are not empty, and names the backend."""
    summaries = [result.summary for result in results]
    lines = []
    if any(each.alarms for each in summaries):
        lines.append("alarms: rows with a cause.")
    if any(each.incidents for each in summaries):
        lines.append("incidents: runs of alarms that the policy acts on.")
    if any(each.rollbacks for each in summaries):
        rollbacks = "rollbacks: the first of each incident"
        if any(each.repeats for each in summaries):
            rollbacks += "; again: repeated orders, because a recorded curve does not recover"
        if any(each.spent for each in summaries):
            rollbacks += "; denied: beyond the budget"
        lines.append(rollbacks + ".")
    if any(each.lowest_lr_first < 1 for each in summaries):
        lines.append("lowest LR: multiplier (cuts).")
    if any(each.stopped_step is not None for each in summaries):
        lines.append("ends at: earliest stop of a live run.")
    return " ".join([*lines, f"Judged with {results[0].backend}."])


def notes(results: Sequence[ReplayResult]) -> list[str]:
    """Describes inactive parts, counts of each attempt, and rows that were not judged."""
    lines = _inactive(results)
    lines += [_by_attempt(each.summary) for each in results if len(each.summary.attempts) > 1]
    unjudged = sum({each.summary.trace: each.summary.unjudged for each in results}.values())
    if unjudged:
        rows = "1 row" if unjudged == 1 else f"{unjudged:,} rows"
        lines.append(f"{rows} without a loss and a gradient norm: not judged")
    return lines


def _inactive(results: Sequence[ReplayResult]) -> list[str]:
    """Returns one line for each policy and missing signal."""
    traces = len({each.summary.trace for each in results})
    several = len({each.summary.policy for each in results}) > 1
    lines = Counter(
        (f"{each.summary.policy}: " if several else "") + inactive_line(signal, parts)
        for each in results
        for signal, parts in each.summary.inactive.items()
    )
    return [
        line if count == traces else f"{line} in {count} of {traces} traces"
        for line, count in lines.items()
    ]


def _by_attempt(summary: Summary) -> str:
    parts = [
        f"{each.incidents} / {each.rollbacks - each.repeats} from step {each.first_step:.15g} on"
        for each in summary.attempts[:_MAX_ATTEMPTS]
    ]
    more = len(summary.attempts) - len(parts)
    return (
        f"{summary.trace}, {summary.policy}: incidents / rollbacks of its {len(summary.attempts)} "
        f"attempts: {', '.join(parts)}{f', and {more} more' if more else ''}"
    )
