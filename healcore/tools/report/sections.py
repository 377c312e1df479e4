"""Collects the text of a page for the templates, which escape every text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from healcore.history import Incident, IncidentOutcome, Mode
from healcore.history.process import RunState
from healcore.runtime.postmortem.sentences import STATES, flag_names, outcome, repeats, step_range
from healcore.tools.report.run_report import MARKERS, RunReport, short_names
from healcore.tools.report.runs import policy_text

_MAX_INCIDENTS = 1000
"""Limit of rows in a table of incidents, because browsers cannot open pages with many more."""
_MAX_ATTEMPTS = 50
_MAX_MULTIPLIERS = 6
_MAX_RANGES = 6
_MAX_TENSORS = 5
_NOTHING = "–"

_HANDLING = (
    "Drag to zoom, double-click to reset the zoom, click a mark to find its row in the table or a "
    "row to find its mark."
)
_CAPTIONS = {
    Mode.HEAL: "Faint steps were undone by a rollback or a restart; the numbers above include "
    "them. A dotted line leads from a rollback to its checkpoint.",
    Mode.OBSERVE: "The policy only observed and did not change this run. Marks show what the "
    "policy would have ordered. Faint steps were undone by a restart.",
    Mode.REPLAY: "A replay, which did not change this run. Marks show what the policy would have "
    "ordered. The run itself repeated the faint steps.",
}
_BADGES = {RunState.COMPLETED: "good", RunState.RUNNING: "open", RunState.UNKNOWN: "open"}
"""CSS class of a state's badge; the class of other states is `bad`."""

_COLUMNS = {
    "Incident": "number",
    "Steps": "steps",
    "Cause": "",
    "Ordered": "",
    "Outcome": "outcome",
    "Skipped": "short",
    "LR ×": "short",
    "Checkpoint": "checkpoint",
    "Batches": "",
    "Evidence": "evidence",
}
"""Column -> CSS class, which sets the width."""
_WOULD = {"Ordered": "Would order", "Skipped": "Would skip"}


def page_title(reports: Sequence[RunReport]) -> str:
    """Returns the name of a single run, or the number of runs or replays."""
    if len(reports) == 1:
        return short_names(reports)[0]
    return f"{len(reports)} {'replays' if reports[0].mode is Mode.REPLAY else 'runs'}"


def overview(reports: Sequence[RunReport]) -> dict[str, Any]:
    """Returns the table of all runs, in the order of the page."""
    ending = "Ends at" if all(report.mode is Mode.REPLAY for report in reports) else "Ending"
    rows = []
    for report, name in zip(reports, short_names(reports), strict=True):
        counts = report.counts
        rollbacks = str(counts.rollbacks), repeats(counts, would=report.would)
        rows.append(
            (
                name,
                report.policy_name,
                report.row_count,
                str(counts.incidents),
                ", ".join(filter(None, rollbacks)),
                f"{counts.skips:,}",
                _NOTHING if counts.clips is None else f"{counts.clips:,}",
                report.ending() or _NOTHING,
            )
        )
    return {
        "heads": ("Run", "Policy", "Rows", "Incidents", "Rollbacks", "Skips", "Clips", ending),
        "rows": rows,
        "titles": [report.title for report in reports],
    }


def section(report: RunReport) -> dict[str, Any]:
    """Returns the section of a run. The page's script draws the plot."""
    return {
        "title": report.title,
        "policy_name": report.policy_name,
        "fingerprint": report.fingerprint,
        "badges": _badges(report),
        "tiles": [*_count_tiles(report), *_loss_tiles(report)],
        "notes": [*report.notes, *report.gaps()],
        "diagnosis": list(_paragraphs(report.diagnosis)),
        "completed": report.state is RunState.COMPLETED,
        "drawn": bool(len(report.curves.step)),
        "caption": f"{_CAPTIONS[report.mode]} {_HANDLING}",
        "table": _incident_table(report.incidents, would=report.would),
        "policy": policy_text(report.policy_name, report.fingerprint, report.policy_toml),
        "facts": _facts(report),
    }


def _badges(report: RunReport) -> list[tuple[str, str]]:
    if report.mode is Mode.REPLAY or report.state is None:
        return [("open", "replay: this run was not changed")]
    ending = (_BADGES.get(report.state, "bad"), STATES[report.state])
    observed = ("open", "only observed, nothing changed")
    return [ending, observed] if report.mode is Mode.OBSERVE else [ending]


def _count_tiles(report: RunReport) -> list[tuple[str, str]]:
    counts = report.counts
    would = "would be " if report.would else ""
    rollbacks = "rollback" if counts.rollbacks == 1 else "rollbacks"
    rollbacks = "would roll back" if report.would else rollbacks
    again = repeats(counts, would=report.would)
    tiles = [
        (
            str(counts.incidents),
            ("incident" if counts.incidents == 1 else "incidents")
            + _undone(counts.undone_incidents),
        ),
        (str(counts.rollbacks), ", ".join(filter(None, (rollbacks, again)))),
        (
            f"{counts.skips:,}",
            f"{_steps(counts.skips)} {would}skipped{_undone(counts.undone_skips)}",
        ),
    ]
    if counts.clips is not None:
        tiles.append((f"{counts.clips:,}", f"{_steps(counts.clips)} {would}clipped"))
    if counts.alarms is not None:
        tiles.append((f"{counts.alarms:,}", f"{_steps(counts.alarms)} with an alarm"))
    return [*tiles, (report.row_count, "rows")]


def _steps(number: int) -> str:
    return "step" if number == 1 else "steps"


def _undone(number: int) -> str:
    return f", {number:,} of them undone" if number else ""


def _loss_tiles(report: RunReport) -> list[tuple[str, str]]:
    """Returns the last loss, the last finite loss if different, and the lowest loss."""
    curves = report.curves
    current = ~curves.undone()
    finite = curves.loss[np.isfinite(curves.loss) & current]
    if not len(finite):
        return []
    if curves.isolated:
        last = [(f"{finite[-1]:.4g}", "last known loss")]
    else:
        nonfinite = False if curves.nonfinite is None else curves.nonfinite
        logged = curves.loss[current & (np.isfinite(curves.loss) | nonfinite)]
        last = [(f"{logged[-1]:.4g}", "last loss")]
        if not np.isfinite(logged[-1]):
            last.append((f"{finite[-1]:.4g}", "last finite loss"))
    return [*last, (f"{finite.min():.4g}", "lowest loss")]


def _paragraphs(diagnosis: str) -> Iterator[tuple[str, bool]]:
    """Iterates over the paragraphs of a diagnosis, and whether each is an item of a list.

    A line that begins with a space continues the previous line.
    """
    text, item = "", False
    for line in diagnosis.splitlines():
        bullet = line.lstrip().startswith("- ")
        if text and line.startswith(" ") and not bullet:
            text += f" {line.strip()}"
            continue
        if text:
            yield text, item
        text, item = line.strip().removeprefix("- "), bullet
    if text:
        yield text, item


def _facts(report: RunReport) -> dict[str, str]:
    facts = dict(report.facts)
    if len(report.attempts) > 1:
        texts = [report.attempt_text(attempt) for attempt in report.attempts[:_MAX_ATTEMPTS]]
        more = len(report.attempts) - _MAX_ATTEMPTS
        facts["Attempts"] = "; ".join(texts) + (f"; and {more} more" if more > 0 else "")
    return facts


# -- the table of incidents ------------------------------------------------------------------------


def _incident_table(incidents: Sequence[Incident], *, would: bool) -> dict[str, Any]:
    """Returns the table without empty columns. The index of a row links it to the plot."""
    rows = [_cells(incident) for incident in incidents[:_MAX_INCIDENTS]]
    shown = [i for i in range(len(_COLUMNS) - 1) if any(row[i] != (_NOTHING,) for row in rows)]
    first, *others = _COLUMNS.items()
    columns = [(_WOULD.get(name, name) if would else name, kind) for name, kind in others]
    return {
        "columns": [first, *(columns[i] for i in shown)],
        "rows": [
            {
                "number": incident.number,
                "outcome": incident.outcome,
                "text": _outcome_label(incident, would),
                "cells": [row[i] for i in shown],
            }
            for incident, row in zip(incidents, rows, strict=False)
        ],
        "more": max(len(incidents) - _MAX_INCIDENTS, 0),
    }


def _outcome_label(incident: Incident, would: bool) -> str:
    text = MARKERS[incident.outcome].label(would)
    if incident.outcome is IncidentOutcome.ROLLBACK and incident.stopped:
        text += f", then {'stopped' if would else MARKERS[IncidentOutcome.STOP].done}"
    return text


def _cells(incident: Incident) -> list[tuple[str, ...]]:
    """Returns the cells of a row, except the first. Each cell is a tuple of lines."""
    cells = (
        step_range(incident.onset_step, incident.end[0]),
        flag_names(incident.cause),
        ", ".join(flag_names([name]) for name in incident.action),
        outcome(incident),
        str(incident.skipped),
        _lr_path(incident),
        "" if incident.checkpoint is None else str(incident.checkpoint),
        _batches(incident),
    )
    worst = incident.evidence[:_MAX_TENSORS]
    evidence = tuple(f"{tensor.name} ({tensor.grad_norm:.3g})" for tensor in worst)
    return [*((cell or _NOTHING,) for cell in cells), evidence or (_NOTHING,)]


def _lr_path(incident: Incident) -> str:
    if not incident.lr_path or incident.lr_path[0] == incident.lr_path[-1]:
        return ""
    path = [f"{multiplier:.4g}" for multiplier in incident.lr_path]
    if len(path) > _MAX_MULTIPLIERS:
        path[_MAX_MULTIPLIERS - 2 : -1] = ["…"]
    return " → ".join(path)


def _batches(incident: Incident) -> str:
    ranges = _ranges(incident.skipped_batches or incident.batches)
    text = "; ".join(
        f"epoch {epoch}: {step_range(first, last)}" for epoch, first, last in ranges[:_MAX_RANGES]
    )
    more = len(ranges) - _MAX_RANGES
    text += f"; and {more} more ranges" if more > 0 else ""
    return f"{text} (skipped)" if text and incident.skipped_batches else text


def _ranges(batches: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Groups consecutive (epoch, index) into (epoch, first, last)."""
    ranges: list[tuple[int, int, int]] = []
    for epoch, index in sorted(set(batches)):
        if ranges and (epoch, index) == (ranges[-1][0], ranges[-1][2] + 1):
            ranges[-1] = (epoch, ranges[-1][1], index)
        else:
            ranges.append((epoch, index, index))
    return ranges
