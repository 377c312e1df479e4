"""Thins the curves of a run for plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

_MAX_ROWS = 9000  # at least 450 bins with all extremes


class Curves(NamedTuple):
    """Curves of a run, in recorded order. Every array is (n,).

    A value is NaN if it was not logged, or if it was logged as NaN. `nonfinite` marks the latter.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # limit of the gradient norm
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    attempt: np.ndarray | None = None  # number, or None if all rows are of attempt 0
    nonfinite: np.ndarray | None = None  # bool: the logged loss or norm is not finite
    rows: int | None = None  # rows before thinning, or None if no row was dropped

    def undone(self) -> np.ndarray:
        """Returns bool (n,): rows that a later attempt replaced by starting at or before them."""
        if self.attempt is None:
            return np.zeros(len(self.step), bool)
        ends = np.flatnonzero(np.diff(self.attempt))  # last row of each attempt except the last
        next_start = np.full(len(self.step), np.inf)
        next_start[ends] = self.step[ends + 1]
        return self.step >= np.minimum.accumulate(next_start[::-1])[::-1]


def thin(index: np.ndarray, curves: Mapping[str, np.ndarray], limit: int) -> np.ndarray:
    """Returns the places of at most `limit` rows that show the extremes of aligned curves.

    Rows are grouped by index, int64 (n,), into bins of equal width. For each curve, a bin keeps the
    rows of the smallest, the largest and the first non-finite value. The width doubles until the
    rows are few enough. The first and the last row are kept. Largest-triangle-three-buckets, the
    usual method, may drop a spike of one row.
    """
    places, width = np.arange(len(index)), 1
    most = max(limit, 3 * max(1, len(curves)) + 2)
    while len(places) > most:
        bins = (index[places] - index[0]) // width
        places = places[_extremes(bins, [curve[places] for curve in curves.values()])]
        width *= 2
    return places


def _extremes(bins: np.ndarray, curves: Iterable[np.ndarray]) -> np.ndarray:
    """Returns bool (n,): the first and last row, and each curve's extremes in each bin."""
    keep = np.zeros(len(bins), bool)
    keep[0] = keep[-1] = True
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    bin_of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(bins))))
    for curve in curves:
        finite = np.isfinite(curve)
        for fill, extreme in ((np.inf, np.minimum), (-np.inf, np.maximum)):
            filled = np.where(finite, curve, fill)
            is_extreme = finite & (filled == extreme.reduceat(filled, starts)[bin_of_row])
            keep[_first_per_bin(is_extreme, bin_of_row)] = True
        keep[_first_per_bin(~finite, bin_of_row)] = True
    return keep


def _first_per_bin(selected: np.ndarray, bin_of_row: np.ndarray) -> np.ndarray:
    """Returns the index of the first selected row in each bin that has one."""
    rows = np.flatnonzero(selected)
    return rows[np.unique(bin_of_row[rows], return_index=True)[1]]


def thinned(curves: Curves) -> Curves:
    """Thins the curves of a run for plots, and drops curves without a value."""
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    arrays = {name: values for name, values in curves._asdict().items() if values is not None}
    kept = thin(np.arange(len(curves.step)), arrays, _MAX_ROWS)
    few = {
        name: values[kept]
        for name, values in arrays.items()
        if name in ("step", "loss") or not np.isnan(values).all()
    }
    return Curves(**few, rows=len(curves.step))
