"""How incidents are marked, the same on the page and in the picture. Never by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.report.story import Incident, Story


class Sign(NamedTuple):
    """One kind of incident."""

    name: str
    words: str
    would: str
    """The same of what was not done."""
    plotly: str
    """Symbol there."""
    matplotlib: str
    colour: str
    """On white, told apart by the colour-blind too. The page's are in its CSS."""

    def told(self, would: bool) -> str:
        """In words.

        Args:
            would: nothing was done, it is what a policy would have done.
        """
        return self.would if would else self.words


SIGNS = {
    sign.name: sign
    for sign in (
        Sign("stop", "stopped the run", "would have stopped", "square", "s", "#000000"),
        Sign("rollback", "rollback", "would have gone back", "triangle-left", "<", "#C04A00"),
        Sign("skip", "skipped", "would have skipped", "triangle-down", "v", "#9A6700"),
        Sign("alert", "alert only", "alert only", "circle", "o", "#A8517F"),
    )
}
"""The gravest first."""


def kind_of(incident: Incident) -> str:
    """What it is marked as where it begins: a key of SIGNS.

    A rollback comes before the stop of the same incident, which has a mark of its own.
    """
    if "ROLLBACK" in incident.action:
        return "rollback"
    if "STOP" in incident.action:
        return "stop"
    return "skip" if incident.skipped else "alert"


def stop_of(story: Story, place: int) -> tuple[float, int] | None:
    """Step and index (-1: not known) of a stop that an incident came to after a rollback.

    Args:
        story: with the incident.
        place: of the incident in it.
    """
    case = story.incidents[place]
    if kind_of(case) != "rollback" or "STOP" not in case.action:
        return None
    if case.stop_step is not None:
        return case.stop_step, case.stop
    after = story.incidents[place + 1 : place + 2]
    end = after[0].onset_step if after and after[0].attempt == case.attempt else np.inf
    stops = (mark.step for mark in story.marks if mark.kind == "stop")
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
