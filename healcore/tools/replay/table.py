"""Builds the table of `healcore replay`, and the text below it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore.console import counted, first_of
from healcore.core.decision import Action
from healcore.policy import Policy
from healcore.tools.replay.replayed import Summary, inactive_line, warmups
from healcore.tools.traces import Trace

COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")
_MAX_NAMED = 4
"""With more policies, the title has their number instead of their names."""
_MAX_ALARMED = 10
"""Limit of summaries whose first alarm is listed, and of the later alarms that a line names; a
screen has no more."""
_PARTS = 10
"""Parts of a loss curve whose medians `unalarmed_rises` compares."""
LEGEND = (
    "alarms: rows with a cause. incidents: alarms that the policy acts on. lowest LR: multiplier "
    "(number of cuts). ends at: stop of a live run."
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
        The table for `rich.console.Console.print`. Names of traces lose their common folder, which
        the title has instead.
    """
    policies = list(dict.fromkeys(summary.policy for summary in summaries))
    traces = list(dict.fromkeys(summary.trace for summary in summaries))
    folder = _common_folder(traces)
    subject = ", ".join(policies)
    if len(policies) > _MAX_NAMED:
        subject = f"{len(policies)} policies"
    title = f"What {subject} would have done"
    if folder:
        title += f", in {folder}"
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


def _common_folder(traces: Sequence[str]) -> str:
    """The common folder of all traces with a final slash, or an empty string."""
    folders = [os.path.dirname(trace) for trace in traces]
    if len({os.path.isabs(folder) for folder in folders}) > 1:
        return ""
    shared = os.path.commonpath(folders)
    if not shared:
        return ""
    return shared.rstrip(os.sep) + os.sep


def first_alarms(summaries: Sequence[Summary]) -> list[str]:
    """Names the step of the first alarm of each replay, or says that there is none.

    This is the answer that a user wants, so it stands above the table.

    Args:
        summaries: one summary for each trace and each policy.

    Returns:
        The first alarm of up to 10 summaries, then up to 10 summaries without an alarm.
    """
    alarmed: list[str] = []
    silent: list[str] = []
    for summary in summaries:
        subject = f"{summary.trace}, {summary.policy}"
        missing = "; ".join(summary.missing.values())
        if not summary.alarms:
            judged = counted(summary.rows - summary.unjudged, "row")
            silent.append(f"{subject}: {missing or f'no alarm in {judged}'}")
            continue
        line = f"{subject}: first alarm at {summary.unit} {summary.first_alarm:.15g}"
        if summary.judged_from is not None:
            start = f"{summary.unit} {summary.judged_from:.15g}"
            line += f"; all detectors judge from {start} on"
        if len(summary.onsets) > 1:
            others = [f"{onset:.15g}" for onset in summary.onsets[1:]]
            line += f"; alarms begin again at {summary.unit} {first_of(others, _MAX_ALARMED)}"
        if missing:
            line += f"; {missing}"
        alarmed.append(line)
    return alarmed[:_MAX_ALARMED] + silent[:_MAX_ALARMED]


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
    policies = len(names)
    traces = len(summaries) // max(policies, 1)
    lines: list[str] = []
    counts: Counter[str] = Counter()
    for summary in summaries:
        for signal, parts in summary.inactive.items():
            line = inactive_line(signal, parts)
            if policies > 1:
                line = f"{summary.policy}: {line}"
            counts[line] += 1
    for line, count in counts.items():
        if count == traces:
            lines.append(line)
        else:
            lines.append(f"{line} in {count} of {traces} traces")
    number = sum(unjudged.values())
    if number:
        lines.append(f"{counted(number, 'row')} without a loss and a gradient norm: not judged")
    return lines


def unalarmed_rises(traces: Sequence[Trace], summaries: Sequence[Summary]) -> list[str]:
    """Names the losses that end far above their lowest level without an alarm.

    Args:
        traces: the traces.
        summaries: one summary for each trace and each policy.

    Returns:
        A hint for each such trace.
    """
    lines: list[str] = []
    for trace in traces:
        own = [summary for summary in summaries if summary.trace == trace.name]
        losses = trace.rows.values.get("loss")
        if losses is None or not own or any(summary.alarms for summary in own):
            continue
        losses = losses[np.isfinite(losses)]
        if len(losses) < _PARTS * _PARTS:
            continue
        levels = [float(np.median(part)) for part in np.array_split(losses, _PARTS)]
        lowest = min(levels)
        if levels[-1] > 2 * lowest > 0:
            lines.append(
                f"{trace.name}: no alarm, but the loss ends near {levels[-1]:.3g}, far above its "
                f"lowest level of {lowest:.3g}: -p pretraining also watches for a slow climb"
            )
    return lines


def limits_of_replay(policies: Mapping[str, Policy], summaries: Sequence[Summary]) -> list[str]:
    """Describes what a replay cannot show: rows of the warm-up, and comparisons of weights.

    Args:
        policies: the policies by their name in the summaries.
        summaries: one summary for each trace and each policy.

    Returns:
        Sentences for below the table.
    """
    lines: list[str] = []
    for name, policy in policies.items():
        inactive: list[set[str]] = []
        for summary in summaries:
            if summary.policy == name:
                inactive.append(set().union(*summary.inactive.values()))
        learning: list[str] = []
        for detector, rows in warmups(policy.engine()).items():
            if any(detector not in parts for parts in inactive):
                learning.append(f"{detector} {rows} rows")
        if learning:
            lines.append(
                f"Look at the first rows yourself: until it has learnt the run "
                f"({', '.join(learning)}), a detector finds only NaN and Inf."
            )
        rules = policy.engine().config.rules
        rolls_back = any(rule.action & Action.ROLLBACK for rule in (*rules, *policy.host_rules()))
        if policy.rollback.confirm and rolls_back:
            lines.append(
                f"A log has no weights. A Healer with {name} also compares weights, and may roll "
                "back."
            )
    if any(summary.skips > 1 for summary in summaries):
        lines.append(
            "The rows are as they were logged. In a live run the first skip changes the rows "
            "after it, so it often is the only one."
        )
    return list(dict.fromkeys(lines))
