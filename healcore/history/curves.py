"""Thins the curves of a run for plots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from healcore.history.metrics import MetricRows

_MAX_ROWS = 9000  # at least 450 bins with all extremes


class Curves(NamedTuple):
    """Thinned curves for plots, in recorded order. Every array is (n,).

    A value is NaN if it was not logged, or if it was logged as NaN. `nonfinite` marks the latter.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # limit of the gradient norm
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    index: np.ndarray | None = None  # int64, row numbers in the log, or None for 0, 1, 2, ...
    attempt: np.ndarray | None = None  # int64, or None if all rows are of attempt 0
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


class Envelope:
    """Thins aligned curves to at most `limit` rows, in a streaming fashion.

    Rows are grouped by index into bins of equal width. For each curve, a bin keeps the rows of the
    smallest, the largest and the first non-finite value. If there are too many bins, the width
    doubles. Bins are aligned, so the result does not depend on the chunks. The first and the last
    row are kept. Largest-triangle-three-buckets, the usual method, may drop a spike of one row.
    """

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._width = 1
        self._chunks: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._count = 0
        self._origin: int | None = None
        self._names: list[str] = []

    def add(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Adds rows. `index`, int64 (n,), increases over all calls. Missing curves are NaN."""
        if not len(index):
            return
        if self._origin is None:
            self._origin = int(index[0])
        self._names += [name for name in values if name not in self._names]
        self._chunks.append((np.asarray(index), {k: np.asarray(v) for k, v in values.items()}))
        self._count += len(index)
        # Thinning only above a multiple of the limit costs amortized O(1) per row.
        if self._count > 4 * self._limit + 4096:
            self._thin(2 * self._limit)

    def thinned(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the index, int64 (m,), and the curves, float32 (m,) each, of the kept rows."""
        if not self._chunks:
            return np.empty(0, np.int64), {}
        self._thin(self._limit)
        index, values = self._chunks[0]
        return index.copy(), {name: curve.copy() for name, curve in values.items()}

    def _thin(self, most: int) -> None:
        index, values = self._joined()
        floor = 3 * max(1, len(self._names)) + 2
        while len(index) > max(most, floor):
            keep = self._extremes(index, values)
            index = index[keep]
            values = {name: curve[keep] for name, curve in values.items()}
            if len(index) > max(most, floor):
                self._width *= 2
        self._chunks = [(index, values)]
        self._count = len(index)

    def _joined(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        index = np.concatenate([index for index, _ in self._chunks])
        values = {
            name: np.concatenate(
                [
                    curves.get(name, np.full(len(index), np.nan, np.float32)).astype(np.float32)
                    for index, curves in self._chunks
                ]
            )
            for name in self._names
        }
        return index, values

    def _extremes(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns bool (n,): the first and last row, and each curve's extremes in each bin."""
        keep = np.zeros(len(index), bool)
        keep[0] = keep[-1] = True
        bins = (index - self._origin) // self._width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        bin_of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(index))))
        for curve in values.values():
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


def thinned(rows: MetricRows) -> Curves:
    """Thins the rows of a run for plots."""
    envelope = Envelope(limit=_MAX_ROWS)
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    aligned = {**rows.values, "attempt": rows.attempt, "nonfinite": rows.nonfinite}
    envelope.add(np.arange(len(rows.step)), aligned)
    index, _ = envelope.thinned()
    curve = {
        name: None if np.isnan(values).all() else values[index]
        for name, values in rows.values.items()
    }
    return Curves(
        step=rows.step[index],
        loss=rows.values["loss"][index],
        grad_norm=curve["grad_norm"],
        threshold=curve["threshold"],
        lr_scale=curve["lr_scale"],
        index=index,
        attempt=rows.attempt[index],
        nonfinite=rows.nonfinite[index],
        rows=len(rows.step),
    )
