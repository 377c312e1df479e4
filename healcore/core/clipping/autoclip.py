"""AutoClip: clips at a percentile of the norms seen so far.

Seetharaman et al., 2020, arXiv:2007.14469. The original sorts the whole history at each step. This
version keeps a histogram of 16 bins per octave: O(1) memory, integer counts that are equal in every
backend, and a percentile at most one bin (4.4 %) too high. At `2 * window` norms all counts are
halved, so that the rule follows a lasting level shift within five windows. As published, raw norms
enter: clipped norms would lower the percentile further and further.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.clipping.fixed import Clip, scale_to
from healcore.core.ranges import Limit, Steps, number
from healcore.core.signals import Observed
from healcore.core.tree import Int, zeros

_PER_OCTAVE = 16
_OCTAVES = 32  # 2**-32 to 2**32
EDGES = np.exp2(
    np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1) / _PER_OCTAVE
).astype(np.float32)
"""Edges of the bins; a namespace of a device keeps this table on the device."""
BINS = len(EDGES) - 1  # number of bins


class AutoClipState(NamedTuple):
    """Histogram of the recent norms."""

    counts: Int  # (BINS,): norms per bin


class AutoClipConfig(NamedTuple):
    """Parameters of AutoClip."""

    percentile: Annotated[Any, number(above=0, below=100)] = 10.0
    """Percentile of the recent norms at which norms are clipped, in (0, 100)."""
    window: Steps = 200
    """The histogram covers between one and two times this many norms."""
    max_norm: Limit = None
    """Additional absolute limit, or None."""

    kind = "autoclip"

    def init(self, *, groups: int = 0) -> AutoClipState:
        """An empty histogram."""
        del groups
        return zeros(AutoClipState, (BINS,))

    def update(
        self, state: AutoClipState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[AutoClipState, Clip]:
        """Adds `seen.grad_norm` to the histogram, then clips it at the percentile."""
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
            target = xp.minimum(target, self.max_norm)
            threshold = xp.where(known, target, self.max_norm)
        over = norm > target
        limit = xp.where(over, target, norm)
        zero = norm - norm
        new_counts = xp.where(full[..., None], counts // 2, counts)
        return AutoClipState(xp.astype(new_counts, xp.int32)), Clip(
            scale_to(limit, norm, over, xp=xp), zero + threshold, zero, over
        )


def _percentile(percent: Any, counts: Any, total: Any, edges: Any, *, xp: Any) -> Any:
    """Upper edge of the bin that holds the percentile.

    Interpolation would clip equal norms forever, by up to the width of a bin. The last sum has only
    one term other than zero, so its order does not matter.
    """
    below = numerics.as_float(xp.cumsum(counts, axis=-1), xp=xp)
    rank = numerics.product(percent, numerics.as_float(total, xp=xp), xp=xp) * 0.01
    before = below - numerics.as_float(counts, xp=xp)
    in_bin = (below >= rank[..., None]) & (before < rank[..., None])
    return xp.sum(xp.where(in_bin, edges[1:], 0.0), axis=-1)
