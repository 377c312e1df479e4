"""How incidents are marked, the same on the page and in the picture. Never by colour alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.report.story import Incident


class Sign(NamedTuple):
    """One kind of incident."""

    name: str
    words: str
    plotly: str
    """Symbol there."""
    matplotlib: str
    colour: str
    """On white, told apart by the colour-blind too. The page's are in its CSS."""


SIGNS = {
    sign.name: sign
    for sign in (
        Sign("stop", "stopped the run", "square", "s", "#000000"),
        Sign("rollback", "rollback", "triangle-left", "<", "#C04A00"),
        Sign("skip", "skipped", "triangle-down", "v", "#9A6700"),
        Sign("alert", "alert only", "circle", "o", "#A8517F"),
    )
}
"""The gravest first."""


def kind_of(incident: Incident) -> str:
    """What it came to: a key of SIGNS."""
    if "STOP" in incident.action:
        return "stop"
    if "ROLLBACK" in incident.action:
        return "rollback"
    return "skip" if incident.skipped else "alert"


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
