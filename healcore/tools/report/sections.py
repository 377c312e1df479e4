"""Makes the text of a page as plain data for the templates, which escape every text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from healcore.history import Incident, IncidentOutcome, Mode
from healcore.history.process import RunState
from healcore.runtime.postmortem.sentences import STATES, flag_names, outcome, repeats, step_range
from healcore.tools.report.run_report import MARKERS, RunReport, short_names
from healcore.tools.report.runs import policy_text

_INCIDENTS = 1000
"""Most incidents with a row; browsers cannot open pages with many more."""
_ATTEMPTS = 50
_RATES = 6
_BATCHES = 6
_TENSORS = 5
"""Most attempts of a run, and most multipliers, batch ranges and tensors of an incident."""
_NOTHING = "–"

_HANDLING = (
    "Drag to zoom, double-click for everything, click a mark or a row of the table to find the "
    "other."
)
_CAPTIONS = {
    Mode.HEAL: "Faint steps were undone by a rollback or a restart; the numbers above count them. "
    "A dotted line leads from a rollback to its checkpoint.",
    Mode.OBSERVE: "The policy only observed: nothing was done to this run. Marks show what it "
    "would have ordered. Faint steps were undone by a restart.",
    Mode.REPLAY: "A replay: nothing was done to this run. Marks show what the policy would have "
    "ordered; the run itself repeated the faint steps.",
}
_BADGES = {RunState.COMPLETED: "good", RunState.RUNNING: "open", RunState.UNKNOWN: "open"}
"""CSS class of a state's badge; other states are bad."""

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
"""Name -> CSS class, which sets the width."""
_WOULD = {"Ordered": "Would order", "Skipped": "Would skip"}


def page_title(reports: Sequence[RunReport]) -> str:
    """The title of a page."""
    if len(reports) == 1:
        return short_names(reports)[0]
    return f"{len(reports)} {'replays' if reports[0].mode is Mode.REPLAY else 'runs'}"


def overview(reports: Sequence[RunReport]) -> dict[str, Any]:
    """The table of all runs, in the order of the page."""
    ends = "Ends at" if all(each.mode is Mode.REPLAY for each in reports) else "Ending"
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
        "heads": ("Run", "Policy", "Rows", "Incidents", "Rollbacks", "Skips", "Clips", ends),
        "rows": rows,
        "titles": [report.title for report in reports],
    }


def section(report: RunReport) -> dict[str, Any]:
    """The section of a run. The page's script draws its plot."""
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
        return [("open", "replay: nothing was done to this run")]
    ending = (_BADGES.get(report.state, "bad"), STATES[report.state])
    observed = ("open", "observed: nothing was done")
    return [ending, observed] if report.mode is Mode.OBSERVE else [ending]


def _count_tiles(report: RunReport) -> list[tuple[str, str]]:
    counts = report.counts
    would = "would be " if report.would else ""
    rollbacks = "would roll back" if report.would else "rollbacks"
    again = repeats(counts, would=report.would)
    tiles = [
        (
            str(counts.incidents),
            ("incident" if counts.incidents == 1 else "incidents")
            + _undone(counts.undone_incidents),
        ),
        (str(counts.rollbacks), ", ".join(filter(None, (rollbacks, again)))),
        (f"{counts.skips:,}", f"steps {would}skipped{_undone(counts.undone_skips)}"),
    ]
    if counts.clips is not None:
        tiles.append((f"{counts.clips:,}", f"steps {would}clipped"))
    if counts.alarms is not None:
        tiles.append((f"{counts.alarms:,}", "steps with an alarm"))
    return [*tiles, (report.row_count, "rows")]


def _undone(number: int) -> str:
    return f", {number:,} of them undone" if number else ""


def _loss_tiles(report: RunReport) -> list[tuple[str, str]]:
    """The last loss, which may be NaN or Inf, and the smallest loss."""
    curves = report.curves
    kept = ~curves.undone()
    loss = curves.loss[np.isfinite(curves.loss) & kept]
    if not len(loss):
        return []
    if curves.isolated:
        last = [(f"{loss[-1]:.4g}", "last known loss")]
    else:
        bad = np.zeros(len(kept), bool) if curves.nonfinite is None else curves.nonfinite
        known = curves.loss[kept & (np.isfinite(curves.loss) | bad)]
        last = [(f"{known[-1]:.4g}", "last loss")]
        if not np.isfinite(known[-1]):
            last.append((f"{loss[-1]:.4g}", "last finite loss"))
    return [*last, (f"{loss.min():.4g}", "lowest loss")]


def _paragraphs(diagnosis: str) -> Iterator[tuple[str, bool]]:
    """The paragraphs of the diagnosis, and whether each is an item of a list.

    A line that begins with a space continues the line before.
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
        named = [report.attempt_text(each) for each in report.attempts[:_ATTEMPTS]]
        more = len(report.attempts) - _ATTEMPTS
        facts["Attempts"] = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
    return facts


# -- the table of incidents ------------------------------------------------------------------------


def _incident_table(incidents: Sequence[Incident], *, would: bool) -> dict[str, Any]:
    """The table without empty columns. A row is linked to the plot by its position."""
    rows = [_cells(incident) for incident in incidents[:_INCIDENTS]]
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
        "more": max(len(incidents) - _INCIDENTS, 0),
    }


def _outcome_label(incident: Incident, would: bool) -> str:
    text = MARKERS[incident.outcome].label(would)
    if incident.outcome is IncidentOutcome.ROLLBACK and "STOP" in incident.action:
        text += f", then {'stopped' if would else MARKERS[IncidentOutcome.STOP].done}"
    return text


def _cells(incident: Incident) -> list[tuple[str, ...]]:
    """The cells of a row, except the first. Each cell is a tuple of lines."""
    cells = (
        step_range(incident.onset_step, incident.end[0]),
        flag_names(incident.cause),
        ", ".join(flag_names([name]) for name in incident.action),
        outcome(incident),
        str(incident.skipped),
        _rate(incident),
        "" if incident.checkpoint is None else str(incident.checkpoint),
        _batches(incident),
    )
    worst = incident.evidence[:_TENSORS]
    evidence = tuple(f"{each.name} ({each.grad_norm:.3g})" for each in worst)
    return [*((cell or _NOTHING,) for cell in cells), evidence or (_NOTHING,)]


def _rate(incident: Incident) -> str:
    if not incident.lr_path or incident.lr_path[0] == incident.lr_path[-1]:
        return ""
    path = [f"{rate:.4g}" for rate in incident.lr_path]
    if len(path) > _RATES:
        path[_RATES - 2 : -1] = ["…"]
    return " → ".join(path)


def _batches(incident: Incident) -> str:
    ranges = _ranges(incident.skipped_batches or incident.batches)
    text = "; ".join(
        f"epoch {epoch}: {step_range(first, last)}" for epoch, first, last in ranges[:_BATCHES]
    )
    more = len(ranges) - _BATCHES
    text += f"; and {more} more ranges" if more > 0 else ""
    return f"{text} (skipped)" if text and incident.skipped_batches else text


def _ranges(batches: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(epoch, first, last) of consecutive batches."""
    found: list[tuple[int, int, int]] = []
    for epoch, index in sorted(set(batches)):
        if found and (epoch, index) == (found[-1][0], found[-1][2] + 1):
            found[-1] = (epoch, found[-1][1], index)
        else:
            found.append((epoch, index, index))
    return found
