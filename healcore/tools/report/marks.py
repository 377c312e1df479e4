"""How incidents are marked, the same on the page and in the picture. Never by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.history import IncidentOutcome
from healcore.history.run import MarkKind
from healcore.tools.report.report import RunReport
from healcore.tools.report.words import repeats

_O = IncidentOutcome


class Sign(NamedTuple):
    """How the incidents with one outcome are marked."""

    outcome: IncidentOutcome
    words: str
    would: str
    """The same of what was not done."""
    plotly: str
    """Symbol there."""
    matplotlib: str
    colour: str
    """On white, told apart by the colour-blind too. The page's are in its CSS."""

    def text(self, would: bool) -> str:
        """In words.

        Args:
            would: nothing was done, it is what a policy would have done.
        """
        return self.would if would else self.words


SIGNS = {
    sign.outcome: sign
    for sign in (
        Sign(_O.STOP, "stopped the run", "would have stopped", "square", "s", "#000000"),
        Sign(_O.ROLLBACK, "rollback", "would have gone back", "triangle-left", "<", "#C04A00"),
        Sign(_O.SKIP, "skipped", "would have skipped", "triangle-down", "v", "#9A6700"),
        Sign(_O.ALERT, "alert only", "alert only", "circle", "o", "#A8517F"),
    )
}
"""The gravest first."""


def by_outcome(report: RunReport) -> list[str]:
    """How many incidents came to what; one with a rollback and a stop is among both."""
    counts = report.counts
    found = {one: sum(case.outcome is one for case in report.incidents) for one in SIGNS}
    found |= {IncidentOutcome.STOP: counts.stops, IncidentOutcome.ROLLBACK: counts.rollbacks}
    again = repeats(counts, would=report.would)
    return [
        f"{found[one]} × {sign.text(report.would)}"
        + (f" ({again})" if one is IncidentOutcome.ROLLBACK and again else "")
        for one, sign in SIGNS.items()
        if found[one]
    ]


def stop_of(report: RunReport, place: int) -> tuple[float, int] | None:
    """Step and index (-1: not known) of a stop that an incident came to after a rollback.

    Args:
        report: with the incident.
        place: of the incident in it.
    """
    case = report.incidents[place]
    if case.outcome is not IncidentOutcome.ROLLBACK or "STOP" not in case.action:
        return None
    if case.stop_step is not None:
        return case.stop_step, case.stop
    after = report.incidents[place + 1 : place + 2]
    end = after[0].onset_step if after and after[0].attempt == case.attempt else np.inf
    stops = (mark.step for mark in report.marks if mark.kind is MarkKind.STOP)
    at = next((step for step in stops if case.onset_step <= step < end), None)
    return None if at is None else (at, -1)


def is_wide(values: np.ndarray | None) -> bool:
    """Whether a curve is read better on a logarithmic axis: positive, and over 30 times its least.

    Losses below 0 have no logarithm, and those that stay within a decade or so lose by one.
    """
    if values is None:
        return False
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())


def levels(places: Sequence[float], span: float, rows: int) -> list[int]:
    """Rows for the marks of one lane, so that neighbours stand one above the other.

    Args:
        places: on the axis.
        span: width that a mark with its number takes.
        rows: how many there are; the last one takes what is too much.
    """
    ends = [-np.inf] * rows
    found = [0] * len(places)
    for i in np.argsort(np.asarray(places, float), kind="stable"):
        row = next((row for row in range(rows) if places[i] >= ends[row]), rows - 1)
        ends[row], found[i] = places[i] + span, row
    return found


def labels(places: Sequence[float], rows: Sequence[int], span: float) -> list[bool]:
    """Which marks have room for their number: the next one in their row does not stand on it.

    Args:
        places: on the axis.
        rows: as `levels` gives them.
        span: width that a mark with its number takes.
    """
    found = [True] * len(places)
    following: dict[int, float] = {}
    for i in np.argsort(np.asarray(places, float), kind="stable")[::-1].tolist():
        found[i] = following.get(rows[i], np.inf) - places[i] >= span
        following[rows[i]] = places[i]
    return found
