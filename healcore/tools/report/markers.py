"""How incidents are marked, the same on the page and in the picture. Never by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.history import IncidentOutcome

LANE = 4
"""Rows of the lane above the curves, in which the incidents are marked."""
LABELLED = 60
"""Incidents up to which each has its number next to its marker."""


class Marker(NamedTuple):
    """How the incidents with one outcome are marked."""

    outcome: IncidentOutcome
    done: str
    would: str
    """The same of what was not done."""
    plotly: str
    """Symbol there."""
    matplotlib: str
    colour: str
    """On white, distinguishable by the colour-blind too. The page's colours are in its CSS."""

    def label(self, would: bool) -> str:
        """The outcome; `would`: of what was not done."""
        return self.would if would else self.done


_O = IncidentOutcome
MARKERS = {
    marker.outcome: marker
    for marker in (
        Marker(_O.STOP, "stopped the run", "would have stopped", "square", "s", "#000000"),
        Marker(_O.ROLLBACK, "rollback", "would have rolled back", "triangle-left", "<", "#C04A00"),
        Marker(_O.SKIP, "skipped", "would have skipped", "triangle-down", "v", "#9A6700"),
        Marker(_O.ALERT, "alert only", "alert only", "circle", "o", "#A8517F"),
    )
}
"""The most severe first."""


def is_wide(values: np.ndarray | None) -> bool:
    """Whether a curve gets a logarithmic axis: positive, and over 30 times its smallest value.

    Losses below 0 have no logarithm, and those within a decade or so are read better without.
    """
    if values is None:
        return False
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())


def marker_rows(places: Sequence[float], span: float, rows: int) -> list[int]:
    """Rows for the markers of one lane, so that neighbours stand one above the other.

    Args:
        places: on the axis.
        span: width that a marker with its number takes.
        rows: how many there are; the last one takes what does not fit.
    """
    ends = [-np.inf] * rows
    found = [0] * len(places)
    for i in np.argsort(np.asarray(places, float), kind="stable"):
        row = next((row for row in range(rows) if places[i] >= ends[row]), rows - 1)
        ends[row], found[i] = places[i] + span, row
    return found


def has_room(places: Sequence[float], rows: Sequence[int], span: float) -> list[bool]:
    """Which markers have room for their number: the next one in their row does not stand on it.

    Args:
        places: on the axis.
        rows: of `marker_rows`.
        span: width that a marker with its number takes.
    """
    found = [True] * len(places)
    following: dict[int, float] = {}
    for i in np.argsort(np.asarray(places, float), kind="stable")[::-1].tolist():
        found[i] = following.get(rows[i], np.inf) - places[i] >= span
        following[rows[i]] = places[i]
    return found
