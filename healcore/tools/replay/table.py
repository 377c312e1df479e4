"""Builds the table of `healcore replay`, and the text below it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore.console import counted, first_of
from healcore.tools.replay.replayed import Summary, inactive_line
from healcore.tools.traces import Trace

COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")
_MAX_NAMED = 4
"""With more policies, the title has their number instead of their names."""
_MAX_ALARMED = 10
"""Limit of the later alarms that a line names."""
_PARTS = 10
"""Parts of a loss curve whose medians are compared."""
LEGEND = (
    "alarms: rows with a cause. incidents: alarms that the policy acts on. lowest LR: multiplier "
    "(number of cuts). ends at: stop of a live run. The rows after a skip are as they were logged, "
    "and a log has no weights to compare (docs/replay.md)."
)


def total(summaries: Sequence[Summary], name: str) -> int:
    """Sums a count over several summaries.

    Args:
        summaries: the summaries, of any traces and policies.
        name: a field of `Summary` that is a number, for example "alarms".

    Returns:
        The sum, or 0 without summaries.
    """
    return sum(getattr(summary, name) for summary in summaries)


def summary_table(summaries: Sequence[Summary], *, sums_only: bool = False) -> Table:
    """Builds a table with a row for each trace and policy, and the sums over several traces.

    Args:
        summaries: at least one summary, in the order of the rows. With several policies, each trace
            has one summary for each policy.
        sums_only: whether the table has only the sums, as the table of `healcore sweep`.

    Returns:
        The table for `rich.console.Console.print`. Names are relative to the traces' common folder.
    """
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    traces = list(dict.fromkeys(summary.trace for summary in summaries))
    folders = [os.path.dirname(os.path.abspath(trace)) for trace in traces]
    folder = os.path.commonpath(folders)
    subject = ", ".join(policies)
    if len(policies) > _MAX_NAMED:
        subject = f"{len(policies)} policies"
    title = f"What {subject} would have done"
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
        style = ""
        if name == "ends at":
            style = "red"
        table.add_column(name, justify="right", no_wrap=True, style=style)

    def add(name: str, summaries: Sequence[Summary], style: str = "") -> None:
        cells: list[str | Text] = [Text(name)]
        if len(policies) > 1:
            cells.append(Text(summaries[0].policy))
        table.add_row(*cells, *_cells(summaries), style=style)

    if not sums_only:
        for summary in summaries:
            add(os.path.relpath(summary.trace, folder), [summary])
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
        if count == 0:
            cells.append(Text("-", "dim"))
        elif name in ("skips", "clips"):
            cells.append(Text(f"{count:,}"))
        else:
            cells.append(Text(f"{count:,}", "yellow"))
    cuts = 0
    lowest = summaries[0].lowest_lr
    for summary in summaries:
        cuts += summary.actions.get("CUT_LR", 0)
        lowest = min(lowest, summary.lowest_lr)
    if cuts:
        cells.append(f"{lowest:.3g} ({cuts})")
    else:
        cells.append("-")
    ends: list[float] = []
    for summary in summaries:
        if summary.stopped_step is not None:
            ends.append(summary.stopped_step)
    if not ends:
        cells.append("-")
    elif len(summaries) == 1:
        cells.append(f"{ends[0]:.15g}")
    else:
        cells.append(f"{len(ends)} end")
    return cells


def answers(traces: Sequence[Trace], summaries: Sequence[Summary]) -> list[str]:
    """Names the step of the first alarm of each replay, or says that there is none.

    This is the answer that a user wants, so it stands above the table.

    Args:
        traces: the traces.
        summaries: one summary for each trace and each policy.

    Returns:
        The lines of replays with an alarm, then of those without.
    """
    losses: dict[str, np.ndarray] = {}
    for trace in traces:
        losses[trace.name] = trace.rows.values.get("loss", np.zeros(0))
    alarmed: dict[tuple[str, str], list[str]] = {}  # trace and text -> the policies
    silent: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        missing = "; ".join(summary.missing.values())
        found = alarmed
        if summary.alarms:
            text = f"first alarm at {summary.unit} {summary.first_alarm:.15g}"
            if summary.judged_from is not None:
                start = f"{summary.unit} {summary.judged_from:.15g}"
                text += f"; all detectors judge from {start} on"
            if len(summary.onsets) > 1:
                others = [f"{onset:.15g}" for onset in summary.onsets[1:]]
                text += f"; alarms begin again at {summary.unit} {first_of(others, _MAX_ALARMED)}"
            if missing:
                text += f"; {missing}"
        else:
            found = silent
            judged = counted(summary.rows - summary.unjudged, "row")
            text = missing or f"no alarm in {judged}{_rise(losses[summary.trace])}"
        found.setdefault((summary.trace, text), []).append(summary.policy)
    lines: list[str] = []
    for (trace, text), policies in [*alarmed.items(), *silent.items()]:
        lines.append(f"{trace}, {first_of(policies)}: {text}")
    return lines


def _rise(loss: np.ndarray) -> str:
    """A hint if the loss, shape (n,), ends far above its lowest level; else an empty string."""
    loss = loss[np.isfinite(loss)]
    if len(loss) < _PARTS * _PARTS:
        return ""
    levels = [float(np.median(part)) for part in np.array_split(loss, _PARTS)]
    if not levels[-1] > 2 * min(levels) > 0:
        return ""
    return (
        f", but the loss ends near {levels[-1]:.3g}, far above its lowest level of "
        f"{min(levels):.3g}: -p pretraining also watches for a slow climb"
    )


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Describes the inactive parts of the policies, and the rows that were not judged.

    Args:
        summaries: one summary for each trace and each policy.

    Returns:
        Lines for below the table: each inactive part once with the number of its traces, and the
        number of rows without a loss and a gradient norm.
    """
    unjudged: dict[str, int] = {}
    names: set[str] = set()
    for summary in summaries:
        unjudged[summary.trace] = summary.unjudged
        names.add(summary.policy)
    counts: dict[str, Counter[str]] = {}  # line -> the number of traces for each policy
    for summary in summaries:
        for signal, parts in summary.inactive.items():
            line = inactive_line(signal, parts)
            counts.setdefault(line, Counter())[summary.policy] += 1
    lines: list[str] = []
    for line, by_policy in counts.items():
        if len(by_policy) < len(names):
            line = f"{first_of([*by_policy])}: {line}"
        if max(by_policy.values()) < len(unjudged):
            line += f" in {max(by_policy.values())} of {len(unjudged)} traces"
        lines.append(line)
    number = sum(unjudged.values())
    if number:
        lines.append(f"{counted(number, 'row')} without a loss and a gradient norm: not judged")
    return lines
