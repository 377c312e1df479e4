"""Clips at a multiple of the largest gradient norm that has passed lately.

Let P be the largest norm so far after clipping, less a part that is forgotten at each step. Then

    limit = ratio * P,   P' = max(decay * P, min(norm, limit)).

* Monotone: a larger norm never passes less.
* Scale-free, and no norm locks in: as long as norms exceed the limit, it grows by `ratio` at each
  of them, so a shift of the level by a factor S is followed in log S / log ratio steps.
* A class whose batches have no other class passes after its first few batches if it comes more
  often than every log ratio / (1 - decay) steps.

The first `warmup_steps` norms pass. P is learnt from them as from any other norm, so a single
outlier raises P by no more than `ratio`, unless the outlier is the first norm. NaN, Inf and zero
norms teach nothing. Chosen by `benchmarks/clip_ablation`: docs/detectors.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.clipping.fixed import Clip, scale_to
from healcore.core.signals import Observed


class RecentMaxState(NamedTuple):
    """The recent norms."""

    count: Any  # int32: norms learnt, up to the end of warm-up
    peak: Any  # float32: largest norm that has passed lately; 0 = none yet


class RecentMaxConfig(NamedTuple):
    """Numbers of the rule."""

    ratio: Any = 20.0
    """A norm above this multiple of the largest recent norm is clipped to it."""
    decay: Any = 0.97
    """Decay of the largest recent norm per step, in (0, 1)."""
    warmup_steps: Any = 10
    """Positive finite norms that pass first."""
    max_norm: Any | None = None
    """Absolute limit in addition, during the warm-up too, or None for no limit."""

    def init(self, *, groups: int = 0) -> RecentMaxState:
        """A rule at the start of its warm-up."""
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
        held = xp.where(peak > 0, numerics.smaller(norm, limit, xp=xp), norm)

        passed = xp.where(warm, norm, held)
        threshold = xp.where(warm, 0.0, limit)
        if self.max_norm is not None:
            passed = numerics.smaller(passed, self.max_norm, xp=xp)
            lower = warm | (threshold > self.max_norm)
            threshold = xp.where(lower, self.max_norm, threshold)
        over = norm > passed
        clip = Clip(scale_to(passed, norm, over, xp=xp), threshold, norm - norm, over)

        learn = learn & seen.finite & (norm > 0)
        faded = numerics.product(self.decay, peak, xp=xp)
        learnt = xp.where(learn, numerics.larger(faded, held, xp=xp), peak)
        count = xp.where(learn & warm, count + 1, count)
        return RecentMaxState(count, numerics.settle(learnt, xp=xp)), clip
