"""Makes the tables of `healcore replay`, and the text below them."""

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
from healcore.tools.replay.scores import IN_TIME, ROLLBACKS, Label, Score
from healcore.tools.replay.summary import Summary, inactive_line
from healcore.tools.report.run_report import RunReport

DROPPED_FIRST = ("clips", "last", "first", "skips", "lowest LR", "rows")
"""Columns that a narrow terminal does not show, in the order in which they are dropped."""

_SHORTEST_NAME = 16
"""Characters that the name of a trace gets at least."""
_MANY = 5
"""From this number of policies on, the title has their number instead of their names."""

SCORED = (
    f"found: labelled events met by such orders (in time: within {IN_TIME} rows). "
    "false: orders elsewhere, those within 40 rows as one. latency: median."
)

_MOST_ATTEMPTS = 8
"""Attempts whose counts are printed."""


class ReplayResult(NamedTuple):
    """One trace under one policy."""

    summary: Summary
    backend: str
    answer: str
    """The kind of order that is scored: rollbacks, stops, skips or alarms."""
    label: Label | None
    score: Score | None
    report: RunReport | None


def summary_table(results: Sequence[ReplayResult], *, width: int) -> Table:
    """One row for each trace and policy, and the sums if there are several."""
    policies = list(dict.fromkeys(result.summary.policy for result in results))
    labelled = any(result.label for result in results)
    home = _common([result.summary.trace for result in results])
    names, rows, sums = [], [], []
    for place, result in enumerate(results):
        summary = result.summary
        again = place > 0 and results[place - 1].summary.trace == summary.trace
        names.append("" if again else summary.trace[len(home) :])
        cells = _cells([result], labelled=labelled)
        rows.append([Text(summary.policy), *([""] if again else cells[:1]), *cells[1:]])
    if len({result.summary.trace for result in results}) > 1:
        for policy in policies:
            mine = [result for result in results if result.summary.policy == policy]
            sums.append([Text(policy), *_cells(mine, labelled=labelled)])
    heads = [
        *(
            "policy",
            "rows",
            "incidents",
            "rollbacks",
            "skips",
            "clips",
            "lowest LR",
            "first",
            "last",
        ),
        *("ends at", *(("found", "false") if labelled else ())),
    ]
    if len(policies) == 1:
        heads, rows, sums = heads[1:], [row[1:] for row in rows], [row[1:] for row in sums]
    shown, room = _fitting(heads, [*rows, *sums], width)
    who = listed(policies) if len(policies) < _MANY else f"{len(policies)} policies"
    table = _empty_table(f"What {who} would have done" + (f", in {home}" if home else ""))
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
        table.add_row(Text(_middle(name, room)), *(row[place] for place in shown))
    if sums:
        table.add_section()
    for row in sums:
        everything = f"all {len(results) // len(policies)}"
        table.add_row(everything, *(row[place] for place in shown), style="bold")
    return table


def score_table(results: Sequence[ReplayResult]) -> Table:
    """The scores by folder and policy, without traces that are too short."""
    table = _empty_table("Orders against the labels")
    for name in ("folder", "policy", "by"):
        table.add_column(name, no_wrap=True)
    for name in ("traces", "rows", "found", "in time", "latency", "false", "per 10,000 rows"):
        table.add_column(name, justify="right", no_wrap=True)
    scores: dict[tuple[str, str, str], Score] = {}
    for result in results:
        if result.score is not None and result.label is not None:
            key = (str(PurePath(result.label.file).parent), result.summary.policy, result.answer)
            scores[key] = scores.get(key, Score()).plus(result.score)
    for (folder, policy, answer), score in sorted(scores.items()):
        table.add_row(
            Text(folder),
            Text(policy),
            answer,
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
    """The cells of one result, or the sums of several; see `heads`."""
    all_ = [result.summary for result in results]
    cuts = sum(each.first_cuts for each in all_)
    first = last = ""
    ended = sum(each.stopped_step is not None for each in all_)
    end = f"{ended} end" if ended else "-"
    if len(all_) == 1:
        first = _step(all_[0].first_incident)
        last = _step(all_[0].last_incident if all_[0].incidents > 1 else None)
        end = _step(all_[0].stopped_step)
    cells: list[str | Text] = [
        f"{sum(each.rows for each in all_):,}",
        _count(sum(each.incidents for each in all_), "yellow"),
        _rollbacks(all_),
        _count(sum(each.skips for each in all_)),
        _count(sum(each.clips for each in all_)),
        f"{min(each.lowest_lr_first for each in all_):.3g} ({cuts})" if cuts else "-",
        first,
        last,
        end,
    ]
    scores = [result.score for result in results if result.score is not None]
    if labelled and not scores:
        cells += ["", ""]
    elif labelled:
        score = functools.reduce(Score.plus, scores)
        by = "" if results[0].answer == ROLLBACKS else f" by {results[0].answer}"
        found = f"{score.found} of {score.events}{by}" if score.events else "-"
        missed = score.found < score.events
        cells += [Text(found, "red" if missed else ""), _count(score.false, "red")]
    return cells


def _fitting(
    heads: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int
) -> tuple[list[int], int]:
    """The columns that fit, whole since no number is cut, and the width left for the names."""
    shown = list(range(len(heads)))
    leaving = [heads.index(name) for name in DROPPED_FIRST]
    while True:
        widths = (max(cell_len(str(row[place])) for row in (heads, *rows)) for place in shown)
        room = width - sum(widths) - 2 * len(shown) - 4
        if room >= _SHORTEST_NAME or not leaving:
            return shown, max(room, _SHORTEST_NAME)
        shown.remove(leaving.pop(0))


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


def _rollbacks(all_: Sequence[Summary]) -> Text:
    due, repeats, spent = (
        sum(getattr(each, name) for each in all_) for name in ("rollbacks", "repeats", "spent")
    )
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


def _common(traces: Sequence[str]) -> str:
    """The folder that all are in, with its slash; empty if there is none."""
    folders = [os.path.dirname(trace) for trace in set(traces)]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    shared = os.path.commonpath(folders)
    return shared and shared.rstrip(os.sep) + os.sep


def _middle(name: str, room: int) -> str:
    """A name cut in its middle, since names of runs differ at either end."""
    if len(name) <= room:
        return name
    head = (room - 1) // 3
    return f"{name[:head]}…{name[len(name) - (room - 1 - head) :]}"


def legend(results: Sequence[ReplayResult]) -> str:
    """Explains the columns that are not empty, and names the backend."""
    all_ = [result.summary for result in results]
    lines = []
    if any(each.incidents for each in all_):
        lines.append("incidents: runs of alarms that the policy acts on.")
    if any(each.rollbacks for each in all_):
        rollbacks = "rollbacks: the first of each incident"
        if any(each.repeats for each in all_):
            rollbacks += "; again: repeated orders, because a recorded curve does not recover"
        if any(each.spent for each in all_):
            rollbacks += "; denied: beyond the budget"
        lines.append(rollbacks + ".")
    if any(each.lowest_lr_first < 1 for each in all_):
        lines.append("lowest LR: multiplier (cuts).")
    if any(each.stopped_step is not None for each in all_):
        lines.append("ends at: where a live run would stop, at the earliest.")
    return " ".join([*lines, f"Judged with {results[0].backend}."])


def notes(results: Sequence[ReplayResult]) -> list[str]:
    """Inactive parts, counts of each attempt, and rows that were not judged."""
    lines = _inactive(results)
    lines += [_by_attempt(each.summary) for each in results if len(each.summary.attempts) > 1]
    unjudged = sum({each.summary.trace: each.summary.unjudged for each in results}.values())
    if unjudged:
        rows = "1 row" if unjudged == 1 else f"{unjudged:,} rows"
        lines.append(f"{rows} without a loss and a gradient norm: not judged")
    return lines


def _inactive(results: Sequence[ReplayResult]) -> list[str]:
    """One line for each policy and missing signal."""
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
        for each in summary.attempts[:_MOST_ATTEMPTS]
    ]
    more = len(summary.attempts) - len(parts)
    return (
        f"{summary.trace}, {summary.policy}: incidents / rollbacks of its {len(summary.attempts)} "
        f"attempts: {', '.join(parts)}{f', and {more} more' if more else ''}"
    )
