"""What the variants ordered over one series."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Orders(NamedTuple):
    """Recoveries that were due, by variant, then by row."""

    variant: np.ndarray
    """int64 (orders,), increasing."""
    row: np.ndarray
    """int64 (orders,): place in the series; increasing within one variant."""
    skipped: np.ndarray
    """int32 (variants,): steps skipped, of the series' own rows."""
    recovered: np.ndarray
    """int32 (variants,): orders that are the first of their incident, of the series' own rows."""

    @classmethod
    def of(
        cls, variant: np.ndarray, row: np.ndarray, skipped: np.ndarray, recovered: np.ndarray
    ) -> Orders:
        """Puts them in order."""
        order = np.lexsort((row, variant))
        return cls(variant[order], row[order], skipped, recovered)

    @classmethod
    def from_bits(
        cls, words: np.ndarray, skipped: np.ndarray, recovered: np.ndarray, own: int
    ) -> Orders:
        """Unpacks one bit per row.

        Args:
            words: uint32 (groups, variants): bit `j` of group `g` is row `32 g + j`.
            skipped: int32 (variants,).
            recovered: int32 (variants,).
            own: rows before this one do not count.
        """
        group, variant = np.nonzero(words)
        bits = (words[group, variant][:, None] >> np.arange(32, dtype=np.uint32)) & 1
        which, bit = np.nonzero(bits)
        row = group[which] * 32 + bit
        counts = row >= own
        return cls.of(variant[which][counts], row[counts], skipped, recovered)

    def first(self, count: int) -> Orders:
        """The orders of the first `count` variants."""
        here = self.variant < count
        return Orders(
            self.variant[here], self.row[here], self.skipped[:count], self.recovered[:count]
        )
