"""Defines how incidents are marked in the page and the picture: by shape as well as by colour."""

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
    """The mark of incidents with one outcome; `symbol` and `matplotlib` are its shapes in both."""

    outcome: IncidentOutcome
    done: str
    would: str
    """What `done` is called if nothing was done (observed, replayed)."""
    symbol: str
    matplotlib: str
    colour: str
    """For the picture; they differ for the colour-blind too. The page's colours are in its CSS."""

    def label(self, would: bool) -> str:
        """The outcome; `would`: of a run in which nothing was done."""
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
    """Whether a curve gets a logarithmic axis: positive, and over 30 times its smallest value."""
    if values is None:
        return False
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool(finite.min() > 0) and bool(finite.max() / 30 > finite.min())


def marker_rows(places: Sequence[float], span: float, rows: int) -> list[int]:
    """Row in a lane for each marker, `span` wide with its number.

    Markers that would overlap get different rows; those without a free row get the last.
    """
    ends = [-np.inf] * rows
    found = [0] * len(places)
    for i in np.argsort(np.asarray(places, float), kind="stable"):
        row = next((row for row in range(rows) if places[i] >= ends[row]), rows - 1)
        ends[row], found[i] = places[i] + span, row
    return found


def has_room(places: Sequence[float], rows: Sequence[int], span: float) -> list[bool]:
    """Whether each marker has room for its number (`span`) before the next in its row."""
    found = [True] * len(places)
    following: dict[int, float] = {}
    for i in np.argsort(np.asarray(places, float), kind="stable")[::-1].tolist():
        found[i] = following.get(rows[i], np.inf) - places[i] >= span
        following[rows[i]] = places[i]
    return found


def lane(places: Sequence[float], step: np.ndarray, share: float) -> tuple[list[int], list[bool]]:
    """The row of each marker in the lane above the curves, and whether its number has room.

    A marker with its number takes `share` of the steps.
    """
    room = share * max(float(np.ptp(step)) if len(step) else 1.0, 1.0)
    rows = marker_rows(places, room, LANE)
    return rows, has_room(places, rows, room)
