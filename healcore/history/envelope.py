"""Thinning of curves for pictures: any length in, a bounded number of rows out, extremes kept."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class Envelope:
    """Streaming down-sampling of aligned curves.

    The rows are put into bins of equal width (of index). A bin keeps, of each curve, its smallest
    and its largest finite value and its first non-finite one; all curves of a kept row are kept.
    Where the bins become too many the width doubles: bins are aligned, so the extremes of two are
    the extremes of their union, and the result does not depend on how the rows were cut into
    chunks. The first and the last row are always kept.

    A rejected alternative: largest-triangle-three-buckets. It draws prettier lines, but may leave
    out a spike of one row, which is what these pictures are for.
    """

    def __init__(self, limit: int = 2000) -> None:
        """Makes an empty one.

        Args:
            limit: most rows that are kept. Fewer than one bin per curve needs are raised to that.
        """
        self._limit = limit
        self._width = 1
        self._held: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._count = 0
        self._origin: int | None = None
        self._names: list[str] = []

    def add(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """The next rows.

        Args:
            index: (n,) int64, increasing, also from call to call.
            values: (n,) of each curve. A curve may be missing in some calls: NaN there.
        """
        if not len(index):
            return
        if self._origin is None:
            self._origin = int(index[0])
        self._names += [name for name in values if name not in self._names]
        self._held.append((np.asarray(index), {k: np.asarray(v) for k, v in values.items()}))
        self._count += len(index)
        # Thinned only when a few limits' worth have come together: amortised, O(1) per row.
        if self._count > 4 * self._limit + 4096:
            self._thin(2 * self._limit)

    def kept(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The rows that are left: their index (m,) and the curves (m,), m <= limit."""
        if not self._held:
            return np.empty(0, np.int64), {}
        self._thin(self._limit)
        index, values = self._held[0]
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
        self._held = [(index, values)]
        self._count = len(index)

    def _joined(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        index = np.concatenate([held for held, _ in self._held])
        values = {
            name: np.concatenate(
                [
                    held.get(name, np.full(len(at), np.nan, np.float32)).astype(np.float32)
                    for at, held in self._held
                ]
            )
            for name in self._names
        }
        return index, values

    def _extremes(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Flags (n,): the first and last row, and of each bin the extremes of each curve."""
        keep = np.zeros(len(index), bool)
        keep[0] = keep[-1] = True
        bins = (index - self._origin) // self._width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        of_bin = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(index))))
        for curve in values.values():
            finite = np.isfinite(curve)
            for filled, best in ((np.inf, np.minimum), (-np.inf, np.maximum)):
                safe = np.where(finite, curve, filled)
                hit = finite & (safe == best.reduceat(safe, starts)[of_bin])
                keep[_first_of_each(hit, of_bin)] = True
            keep[_first_of_each(~finite, of_bin)] = True
        return keep


def _first_of_each(hit: np.ndarray, of_bin: np.ndarray) -> np.ndarray:
    at = np.flatnonzero(hit)
    return at[np.unique(of_bin[at], return_index=True)[1]]
