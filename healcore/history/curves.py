"""The curves of a run, and the stretches of which nothing is known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_LEAST = 10
"""Steps, as far apart as rows usually are, that must be missing; a log may skip one or another."""
_MOST = 20
"""Gaps; a log with more of them changes its stride, or has none."""


class Gap(NamedTuple):
    """Between two rows that are known."""

    row: int
    """Place in the curves of the first row after it."""
    low: float
    """Step of the last row before it."""
    high: float
    missing: float
    """How many steps are missing, as far apart as rows usually are."""
    stride: float
    exact: bool
    """The curves are not thinned here: nothing between `low` and `high` is known."""


class Curves(NamedTuple):
    """Curves, thinned, row by row in the order in which they were recorded.

    Every array is (n,). A value is NaN where it was not logged or is NaN, and infinite where it
    was recorded so; `nonfinite` tells what was logged and is not finite.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None
    """Above it a gradient norm is clipped, or is a spike."""
    lr_scale: np.ndarray | None = None
    """Multiplier of the learning rate."""
    index: np.ndarray | None = None
    """int64, of the rows in the trace; None: 0, 1, 2, ..."""
    attempt: np.ndarray | None = None
    """int64; None: all of them attempt 0."""
    nonfinite: np.ndarray | None = None
    """bool: a loss or norm was logged in this row and is not finite; None: not told apart."""
    rows: int | None = None
    """How many rows there were before they were thinned; None: all are here."""

    lonely: bool = False
    """Only single steps are known: points, and no line between them."""

    def undone(self) -> np.ndarray:
        """Bool (n,): rows that a later attempt replaced: it began at or before their step."""
        if self.attempt is None or not len(self.step):
            return np.zeros(len(self.step), bool)
        undone = np.zeros(len(self.step), bool)
        # Recorded order: everything after an attempt's first row is of it or of a later one.
        begins = np.flatnonzero(np.diff(self.attempt)) + 1
        for begin in begins:
            undone[:begin] |= self.step[:begin] >= self.step[begin]
        return undone

    def gaps(self) -> list[Gap]:
        """Where steps are missing in curves that have nearly all others.

        A kill takes the metrics of half a second; other logs have holes too.
        """
        if self.lonely or len(self.step) < 3:
            return []
        index = np.arange(len(self.step)) if self.index is None else self.index
        # Thinned curves too: so many rows have been between two that were kept.
        rows, steps = np.diff(index), np.diff(self.step)
        onward = (steps > 0) & (rows > 0) & np.isfinite(steps)
        if not onward.any():
            return []
        stride = float(np.median(steps[onward] / rows[onward]))
        missing = np.where(onward, steps / stride - rows, 0.0)
        found = np.flatnonzero(missing >= _LEAST)
        if len(found) > min(_MOST, len(steps) / 5):
            return []
        return [
            Gap(
                row=i + 1,
                low=float(self.step[i]),
                high=float(self.step[i + 1]),
                missing=float(missing[i]),
                stride=stride,
                exact=bool(rows[i] == 1),
            )
            for i in found.tolist()
        ]
