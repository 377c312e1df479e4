"""AdaGC: clips each tensor's gradient relative to the moving average of its norm.

Wang et al., 2025, arXiv:2502.11034. For the first `warmup_steps` the global norm is clipped to
`max_norm`, and gamma_i is the smallest clipped norm of tensor i. Then a norm above `ratio *
gamma_i` is clipped to it, and gamma_i' = decay gamma_i + (1 - decay) u_i for the clipped norm u_i.

Differences from the paper (docs/recipes.md): zero and non-finite norms are not learnt, a tensor
first seen after warm-up starts from its own first norm, and gamma follows lasting level shifts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import baseline, numerics
from healcore.core.clipping.global_norm import Clip, scale_to
from healcore.core.ranges import Fraction, Positive, Ratio, Steps
from healcore.core.signals import Observed
from healcore.core.tree import Float, Int, zeros

# A ratio of 1.04 rejects more than half of all noisy norms. So an accepted norm cancels eight
# rejections.
_SHIFT = baseline.ShiftConfig(patience=25, gain=1, forgive=8)


class AdaGCState(NamedTuple):
    """State of n tensors."""

    count: Int  # steps learnt, at most `warmup_steps`
    gamma: Float  # (n,): level of each tensor's norm; 0 = no norm seen
    shift: baseline.ShiftState  # arrays of shape (n,)


class AdaGCConfig(NamedTuple):
    """Parameters of AdaGC."""

    ratio: Ratio = 1.04
    """Multiple of gamma to which larger norms are clipped (the paper's lambda_rel)."""
    ema_decay: Fraction = 0.99
    """Decay of gamma per step (the paper's beta)."""
    warmup_steps: Steps = 100
    """Steps of global clipping (the paper's T_start)."""
    max_norm: Positive = 1.0
    """Global limit during warm-up (the paper's lambda_abs)."""
    shift: baseline.ShiftConfig = _SHIFT

    kind = "adagc"

    def init(self, *, groups: int = 0) -> AdaGCState:
        """The state of `groups` tensors at the start of the warm-up."""
        return zeros(AdaGCState, (groups,))._replace(count=np.zeros((), np.int32))

    def update(
        self, state: AdaGCState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[AdaGCState, Clip]:
        """Judges `seen.group_norms` (n,), then learns them; `Clip` holds arrays of shape (n,)."""
        norms = seen.group_norms
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        learn = learn & seen.finite
        over_global = seen.grad_norm > self.max_norm
        global_scale = scale_to(self.max_norm, seen.grad_norm, over_global, xp=xp)

        warm_n, global_scale_n, learn_n = warm[..., None], global_scale[..., None], learn[..., None]
        restart_n = seen.restart[..., None]
        gamma = xp.where(restart_n, 0.0, state.gamma)
        unknown = gamma == 0
        limit = self.ratio * gamma
        over = ~warm_n & ~unknown & (norms > limit)
        tensor_scale = scale_to(limit, norms, over, xp=xp)
        scale = xp.where(warm_n, global_scale_n, tensor_scale)

        learn_n = learn_n & (norms > 0)
        accepted = xp.where(over, limit, norms)
        clipped = numerics.settle(norms * global_scale_n, xp=xp)
        lowest = xp.where(unknown, clipped, xp.minimum(gamma, clipped))
        rate = numerics.complement(self.ema_decay, norms)
        moved = xp.where(unknown, norms, numerics.ema(gamma, accepted, rate, learn_n, xp=xp))
        gamma = xp.where(learn_n, xp.where(warm_n, lowest, moved), gamma)
        shift_state, shift = baseline.watch_level(
            self.shift, state.shift, norms, over, learn_n & ~warm_n, restart_n, xp=xp
        )
        gamma = xp.where(shift.escaped, shift.level, gamma)
        count = xp.where(learn & warm & (seen.grad_norm > 0), count + 1, count)
        threshold = xp.where(warm_n, self.max_norm, limit)
        zero = norms - norms
        return AdaGCState(count, gamma, shift_state), Clip(
            scale, zero + threshold, zero, (warm_n & over_global[..., None]) | over
        )
