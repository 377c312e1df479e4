"""What a page says of one run, as text; the template makes HTML of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from healcore.history import Mode
from healcore.history.process import RunState
from healcore.tools.report import words
from healcore.tools.report.facts import text_of
from healcore.tools.report.overview import rows_of
from healcore.tools.report.report import RunReport
from healcore.tools.report.table import Table, incident_table

_ATTEMPTS = 50
"""Attempts that are named one by one."""

_CAPTIONS = {
    Mode.HEAL: (
        "Faint: steps that a rollback or a restart has undone. A dotted line leads from a rollback "
        "to its checkpoint. Drag to zoom, double-click for everything, click a mark or a row of "
        "the table to find the other."
    ),
    Mode.OBSERVE: (
        "The policy only observed: nothing was done to this run. Marks are what it would have "
        "ordered; faint are steps that a restart has undone. Drag to zoom, double-click for "
        "everything, click a mark or a row of the table to find the other."
    ),
    Mode.REPLAY: (
        "A replay: nothing was done to this run. Marks are what the policy would have ordered; "
        "faint are steps that the run itself repeated. Drag to zoom, double-click for everything, "
        "click a mark or a row of the table to find the other."
    ),
}
_MOODS = {
    RunState.COMPLETED: "good",
    RunState.RUNNING: "open",
    RunState.UNKNOWN: "open",
}
"""How a state is coloured; the others are bad."""


class Section(NamedTuple):
    """The section of a run; its plot is drawn by the page's script."""

    title: str
    policy_name: str
    fingerprint: str
    badges: tuple[tuple[str, str], ...]
    """Class and text."""
    tiles: tuple[tuple[str, str], ...]
    """Value and name."""
    notes: tuple[str, ...]
    diagnosis: tuple[tuple[str, bool], ...]
    """Paragraphs, and whether each is an item of a list."""
    completed: bool
    drawn: bool
    """There is something to plot."""
    caption: str
    table: Table
    policy: str
    """Text of the policy; empty: not known."""
    facts: dict[str, str]


def section(report: RunReport) -> Section:
    """The section of a run."""
    return Section(
        title=report.title,
        policy_name=report.policy_name,
        fingerprint=report.fingerprint,
        badges=_badges(report),
        tiles=(*_counts(report), *_losses(report)),
        notes=(*report.notes, *words.gaps(report)),
        diagnosis=tuple(_paragraphs(report.diagnosis)),
        completed=report.state is RunState.COMPLETED,
        drawn=bool(len(report.curves.step)),
        caption=_CAPTIONS[report.mode],
        table=incident_table(report.incidents, would=report.would),
        policy=text_of(report.policy_name, report.fingerprint) or report.policy_toml,
        facts=_facts(report),
    )


def _badges(report: RunReport) -> tuple[tuple[str, str], ...]:
    if report.mode is Mode.REPLAY or report.state is None:
        return (("open", "replay: nothing was done to this run"),)
    ending = (_MOODS.get(report.state, "bad"), words.STATES[report.state])
    observed = ("open", "observed: nothing was done")
    return (ending, observed) if report.mode is Mode.OBSERVE else (ending,)


def _counts(report: RunReport) -> list[tuple[str, str]]:
    counts = report.counts
    would = "would be " if report.would else ""
    back = "would go back" if report.would else "rollbacks"
    again = words.repeats(counts, would=report.would)
    tiles = [
        (str(counts.incidents), "incident" if counts.incidents == 1 else "incidents"),
        (str(counts.rollbacks), ", ".join(each for each in (back, again) if each)),
        (f"{counts.skips:,}", f"steps {would}skipped"),
    ]
    if counts.clips is not None:
        tiles.append((f"{counts.clips:,}", f"steps {would}clipped"))
    if counts.alarms is not None:
        tiles.append((f"{counts.alarms:,}", "steps with an alarm"))
    return [*tiles, (rows_of(report), "rows")]


def _losses(report: RunReport) -> list[tuple[str, str]]:
    """The last one, which need not be finite, and the least."""
    curves = report.curves
    kept = ~curves.undone()
    loss = curves.loss[np.isfinite(curves.loss) & kept]
    if not len(loss):
        return []
    if curves.isolated:
        last = [(f"{loss[-1]:.4g}", "last loss known")]
    else:
        bad = np.zeros(len(kept), bool) if curves.nonfinite is None else curves.nonfinite
        known = curves.loss[kept & (np.isfinite(curves.loss) | bad)]
        last = [(f"{known[-1]:.4g}", "last loss")]
        if not np.isfinite(known[-1]):
            last.append((f"{loss[-1]:.4g}", "last finite loss"))
    return [*last, (f"{loss.min():.4g}", "least loss")]


def _paragraphs(diagnosis: str) -> Iterator[tuple[str, bool]]:
    """The diagnosis's paragraphs, and whether each is an item of a list.

    It is wrapped for a terminal; what begins with a space goes on from the line before.
    """
    open_, item = "", False
    for line in diagnosis.splitlines():
        bullet = line.lstrip().startswith("- ")
        if open_ and line.startswith(" ") and not bullet:
            open_ += f" {line.strip()}"
            continue
        if open_:
            yield open_, item
        open_, item = line.strip().removeprefix("- "), bullet
    if open_:
        yield open_, item


def _facts(report: RunReport) -> dict[str, str]:
    facts = dict(report.facts)
    if len(report.attempts) > 1:
        named = [words.attempt(report, each) for each in report.attempts[:_ATTEMPTS]]
        more = len(report.attempts) - _ATTEMPTS
        facts["Attempts"] = "; ".join(named) + (f"; and {more} more" if more > 0 else "")
    return facts
