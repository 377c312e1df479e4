"""Builds the table of `healcore replay`, and the text below it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from healcore.console import listed
from healcore.tools.replay.replayed import Summary, inactive_line

_COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")
_HEADS = (*_COUNTS, "lowest LR", "ends at")
_MAX_NAMED = 4
"""With more policies, the title has their number instead of their names."""

LEGEND = (
    "alarms: rows with a cause. incidents: runs of alarms that the policy acts on. rollbacks: the "
    "first of each incident; again: repeated orders, because a recorded curve does not recover; "
    "denied: beyond the budget. lowest LR: multiplier (cuts). ends at: earliest stop of a live run."
)


def summary_table(summaries: Sequence[Summary]) -> Table:
    """Builds a table with a row for each trace and policy, and the sums over several traces."""
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    traces = list(dict.fromkeys(summary.trace for summary in summaries))
    folder = _common_folder(traces)
    subject = f"{len(policies)} policies" if len(policies) > _MAX_NAMED else listed(policies)
    title = f"What {subject} would have done" + (f", in {folder}" if folder else "")
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("trace", overflow="fold")  # the only column that a narrow terminal wraps
    if len(policies) > 1:
        table.add_column("policy", no_wrap=True)
    for name in _HEADS:
        style = "red" if name == "ends at" else ""
        table.add_column(name, justify="right", no_wrap=True, style=style)

    def add(name: str, summaries: Sequence[Summary], style: str = "") -> None:
        policy = [Text(summaries[0].policy)] if len(policies) > 1 else []
        table.add_row(Text(name), *policy, *_cells(summaries), style=style)

    for summary in summaries:
        add(summary.trace[len(folder) :], [summary])
    if len(traces) > 1:
        table.add_section()
        for policy in policies:
            own = [summary for summary in summaries if summary.policy == policy]
            add(f"all {len(own)}", own, "bold")
    return table


def _cells(summaries: Sequence[Summary]) -> list[str | Text]:
    """Returns the cells of one summary, or the sums of several, below `_HEADS`."""
    cuts = sum(each.first_cuts for each in summaries)
    ends = [each.stopped_step for each in summaries if each.stopped_step is not None]
    if len(summaries) == 1:
        end = f"{ends[0]:.15g}" if ends else "-"
    else:
        end = f"{len(ends)} end" if ends else "-"
    return [
        f"{sum(each.rows for each in summaries):,}",
        _count(sum(each.alarms for each in summaries), "yellow"),
        _count(sum(each.incidents for each in summaries), "yellow"),
        _rollbacks(summaries),
        _count(sum(each.skips for each in summaries)),
        _count(sum(each.clips for each in summaries)),
        f"{min(each.lowest_lr_first for each in summaries):.3g} ({cuts})" if cuts else "-",
        end,
    ]


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


def _common_folder(traces: Sequence[str]) -> str:
    """Returns the common folder of all traces with a final slash, or an empty string."""
    folders = [os.path.dirname(trace) for trace in set(traces)]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    shared = os.path.commonpath(folders)
    return shared and shared.rstrip(os.sep) + os.sep


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Describes inactive parts of the policies, and rows that were not judged."""
    traces = len({each.trace for each in summaries})
    several = len({each.policy for each in summaries}) > 1
    counts = Counter(
        (f"{each.policy}: " if several else "") + inactive_line(signal, parts)
        for each in summaries
        for signal, parts in each.inactive.items()
    )
    lines = [
        line if count == traces else f"{line} in {count} of {traces} traces"
        for line, count in counts.items()
    ]
    unjudged = sum({each.trace: each.unjudged for each in summaries}.values())
    if unjudged:
        rows = "1 row" if unjudged == 1 else f"{unjudged:,} rows"
        lines.append(f"{rows} without a loss and a gradient norm: not judged")
    return lines
