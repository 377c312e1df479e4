"""Clips at a multiple of the largest recent gradient norm.

Let P be the largest norm so far after clipping, with exponential decay. Then

    limit = ratio * P,   P' = max(decay * P, min(norm, limit)).

* Monotone: a larger norm never passes with a smaller value.
* Scale-free. The limit grows by `ratio` at each norm above it, so it follows a level shift by a
  factor S in log S / log ratio steps, and no norm is clipped forever.
* A class whose batches contain no other class passes after its first few batches, if it recurs
  within log ratio / (1 - decay) steps.

The first `warmup_steps` norms pass. P learns them like any other norm, so a single outlier raises P
by at most `ratio`, unless the outlier is the first norm. NaN, Inf and zero norms are not learnt.
Chosen by `benchmarks/clip_ablation`: docs/detectors.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.clipping.fixed import Clip, scale_to
from healcore.core.signals import Observed


class RecentMaxState(NamedTuple):
    """The largest recent norm."""

    count: Any  # int32: norms learnt, at most `warmup_steps`
    peak: Any  # float32: the largest recent norm, P; 0 = no norm seen


class RecentMaxConfig(NamedTuple):
    """Parameters of the rule."""

    ratio: Any = 20.0
    """Multiple of the largest recent norm to which larger norms are clipped."""
    decay: Any = 0.97
    """Decay of the largest recent norm per step, in (0, 1)."""
    warmup_steps: Any = 10
    """Number of positive finite norms that pass at first."""
    max_norm: Any | None = None
    """Additional absolute limit, also during the warm-up, or None."""

    def init(self, *, groups: int = 0) -> RecentMaxState:
        """The state at the start of the warm-up."""
        del groups
        return RecentMaxState(np.zeros((), np.int32), np.zeros((), np.float32))

    def update(
        self, state: RecentMaxState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[RecentMaxState, Clip]:
        """Judges `seen.grad_norm`, then learns it."""
        norm = seen.grad_norm
        count = xp.where(seen.restart, 0, state.count)
        peak = xp.where(seen.restart, 0.0, state.peak)
        warm = count < self.warmup_steps
        limit = numerics.product(self.ratio, peak, xp=xp)
        clipped_norm = xp.where(peak > 0, numerics.smaller(norm, limit, xp=xp), norm)

        passed = xp.where(warm, norm, clipped_norm)
        threshold = xp.where(warm, 0.0, limit)
        if self.max_norm is not None:
            passed = numerics.smaller(passed, self.max_norm, xp=xp)
            lower = warm | (threshold > self.max_norm)
            threshold = xp.where(lower, self.max_norm, threshold)
        over = norm > passed
        clip = Clip(scale_to(passed, norm, over, xp=xp), threshold, norm - norm, over)

        learn = learn & seen.finite & (norm > 0)
        decayed_peak = numerics.product(self.decay, peak, xp=xp)
        learnt = xp.where(learn, numerics.larger(decayed_peak, clipped_norm, xp=xp), peak)
        count = xp.where(learn & warm, count + 1, count)
        return RecentMaxState(count, numerics.settle(learnt, xp=xp)), clip
