"""Builds the table of `healcore replay`, and the text below it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from healcore.console import counted
from healcore.tools.replay.replayed import Summary, inactive_line

COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")
_MAX_NAMED = 4
"""With more policies, the title has their number instead of their names."""
LEGEND = (
    "alarms: rows with a cause. incidents: runs of alarms that the policy acts on. rollbacks: "
    "incidents with a rollback. lowest LR: multiplier (cuts; a recorded curve does not recover, so "
    "one incident may cut again). ends at: earliest stop of a live run."
)


def total(summaries: Sequence[Summary], name: str) -> int:
    """Sums a count over several summaries."""
    return sum(getattr(summary, name) for summary in summaries)


def summary_table(summaries: Sequence[Summary], *, sums_only: bool = False) -> Table:
    """Builds a table with a row for each trace and policy, and the sums over several traces."""
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    traces = list(dict.fromkeys(summary.trace for summary in summaries))
    folder = _common_folder(traces)
    subject = f"{len(policies)} policies" if len(policies) > _MAX_NAMED else ", ".join(policies)
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
    for name in (*COUNTS, "lowest LR", "ends at"):
        style = "red" if name == "ends at" else ""
        table.add_column(name, justify="right", no_wrap=True, style=style)

    def add(name: str, summaries: Sequence[Summary], style: str = "") -> None:
        policy = [Text(summaries[0].policy)] if len(policies) > 1 else []
        table.add_row(Text(name), *policy, *_cells(summaries), style=style)

    for summary in summaries if not sums_only else ():
        add(summary.trace.removeprefix(folder), [summary])
    if len(traces) > 1 or sums_only:
        table.add_section()
        for policy in policies:
            own = [summary for summary in summaries if summary.policy == policy]
            add(f"all {len(own)}", own, "bold")
    return table


def _cells(summaries: Sequence[Summary]) -> list[str | Text]:
    """The cells of one summary, or the sums of several."""
    cells: list[str | Text] = [f"{total(summaries, 'rows'):,}"]
    for name in COUNTS[1:]:
        count = total(summaries, name)
        style = "" if name in ("skips", "clips") else "yellow"
        cells.append(Text(f"{count:,}", style) if count else Text("-", "dim"))
    cuts = sum(summary.actions.get("CUT_LR", 0) for summary in summaries)
    lowest = min(summary.lowest_lr for summary in summaries)
    ends = [summary.stopped_step for summary in summaries if summary.stopped_step is not None]
    end = f"{ends[0]:.15g}" if ends and len(summaries) == 1 else f"{len(ends)} end"
    return [*cells, f"{lowest:.3g} ({cuts})" if cuts else "-", end if ends else "-"]


def _common_folder(traces: Sequence[str]) -> str:
    """The common folder of all traces with a final slash, or an empty string."""
    folders = [os.path.dirname(trace) for trace in traces]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    shared = os.path.commonpath(folders)
    return shared and shared.rstrip(os.sep) + os.sep


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Describes first alarms, inactive parts of the policies, and rows that were not judged."""
    unjudged = {summary.trace: summary.unjudged for summary in summaries}
    policies = len({summary.policy for summary in summaries})
    traces = len(summaries) // max(policies, 1)
    counts = Counter(
        (f"{each.policy}: " if policies > 1 else "") + inactive_line(signal, parts)
        for each in summaries
        for signal, parts in each.inactive.items()
    )
    lines = [
        f"{each.trace}, {each.policy}: first alarm {'near' if each.rounded else 'at'} {each.unit} "
        f"{each.first_alarm:.15g}"
        for each in [each for each in summaries if each.alarms][:10]  # a screen has no more
    ]
    lines += [
        line if count == traces else f"{line} in {count} of {traces} traces"
        for line, count in counts.items()
    ]
    if number := sum(unjudged.values()):
        lines.append(f"{counted(number, 'row')} without a loss and a gradient norm: not judged")
    return lines
