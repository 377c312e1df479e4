"""AutoClip: clip at a percentile of the norms seen so far.

Seetharaman et al., 2020, arXiv:2007.14469. Instead of the whole history, sorted at each step, this
has a histogram of 16 bins per octave: O(1) memory, integer counts that are equal in every backend,
and a percentile at most one bin (4.4 %) above. At `2 * window` norms all counts are halved, so that
the rule follows a true level shift within five windows. Raw norms enter, as published: clipped ones
would lower the percentile for ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.clipping.fixed import Clip, scale_to
from healcore.core.signals import Observed

_PER_OCTAVE = 16
_OCTAVES = 32  # 2**-32 to 2**32
EDGES = np.exp2(
    np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1) / _PER_OCTAVE
).astype(np.float32)
"""Edges of the bins; a table, which a namespace for a device keeps there."""
BINS = len(EDGES) - 1  # number of bins of the histogram


class AutoClipState(NamedTuple):
    """The recent norms."""

    counts: Any  # int32 (BINS,): norms per bin; edges are `EDGES`


class AutoClipConfig(NamedTuple):
    """Numbers of AutoClip."""

    percentile: Any = 10.0
    """Percentile of the recent norms to clip at, in (0, 100)."""
    window: Any = 200
    """Between one and two times this many norms count."""
    max_norm: Any | None = None
    """Absolute limit in addition, or None for no limit."""

    def init(self, *, groups: int = 0) -> AutoClipState:
        """An empty histogram."""
        del groups
        return AutoClipState(np.zeros((BINS,), np.int32))

    def update(
        self, state: AutoClipState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[AutoClipState, Clip]:
        """Puts `seen.grad_norm` into the histogram, then clips it at the percentile."""
        norm = seen.grad_norm
        learn = learn & seen.finite & (norm > 0)
        edges = xp.asarray(EDGES)
        above = norm[..., None] >= edges
        index = xp.sum(xp.astype(above, xp.int32), axis=-1) - 1
        index = xp.where(index < 0, 0, xp.where(index > BINS - 1, BINS - 1, index))
        bins = xp.arange(BINS)
        hit = (bins == index[..., None]) & learn[..., None]

        counts = xp.where(seen.restart[..., None], 0, state.counts)
        counts = xp.where(hit, counts + 1, counts)
        total = xp.sum(counts, axis=-1)
        full = total >= 2 * self.window
        percentile = _percentile(self.percentile, counts, total, edges, xp=xp)

        known = total > 0
        target = xp.where(known, percentile, norm)
        threshold = xp.where(known, percentile, 0.0)
        if self.max_norm is not None:
            target = numerics.smaller(target, self.max_norm, xp=xp)
            threshold = xp.where(known, target, self.max_norm)
        over = norm > target
        limit = xp.where(over, target, norm)
        zero = norm - norm
        kept = xp.where(full[..., None], counts // 2, counts)
        return AutoClipState(xp.astype(kept, xp.int32)), Clip(
            scale_to(limit, norm, over, xp=xp), zero + threshold, zero, over
        )


def _percentile(percent: Any, counts: Any, total: Any, edges: Any, *, xp: Any) -> Any:
    """The upper edge of the bin that holds the percentile.

    Not interpolated: equal norms would be clipped for ever, by up to a bin's width. The last sum
    has one term that is not zero, so its order does not matter.
    """
    below = numerics.as_float(xp.cumsum(counts, axis=-1), xp=xp)
    rank = numerics.product(percent, numerics.as_float(total, xp=xp), xp=xp) * 0.01
    before = below - numerics.as_float(counts, xp=xp)
    here = (below >= rank[..., None]) & (before < rank[..., None])
    return xp.sum(xp.where(here, edges[1:], 0.0), axis=-1)
