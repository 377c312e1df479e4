"""Fixed clipping, and `Clip`, the result of every clipping rule.

Fixed clipping reduces the norm to one absolute limit (Pascanu et al., 2013), as
`torch.nn.utils.clip_grad_norm_` and `optax.clip_by_global_norm` do. It has no baseline and
therefore no escape: norms that stay above `max_norm` are always clipped, as configured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import numerics
from healcore.core.ranges import Positive
from healcore.core.signals import Observed
from healcore.core.tree import zero_init

EPSILON = 1e-6  # added to the norm, as in torch and in the papers


class Clip(NamedTuple):
    """Clipping of one step: arrays of the norm's shape, 0-d, or (n,) for per-tensor rules."""

    scale: Any  # float32 in [0, 1]: factor on the gradient; 1 = unchanged
    threshold: Any  # float32: norm above which the gradient is clipped; 0 = no limit (warm-up)
    z: Any  # float32: z-score of the norm; 0 in warm-up and in rules without a variance
    clipped: Any  # bool


def scale_to(limit: Any, norm: Any, over: Any, *, xp: Any) -> Any:
    """Factor that reduces `norm` to `limit` where `over` holds, else exactly 1."""
    target = xp.where(over, limit, norm)
    scale = numerics.quotient(target, norm + EPSILON, xp=xp)
    return numerics.settle(xp.where(over, scale, 1.0), xp=xp)


class FixedState(NamedTuple):
    """Empty: the rule has no state."""


class FixedConfig(NamedTuple):
    """Parameter of fixed clipping."""

    max_norm: Positive = 1.0
    """Largest gradient norm that is not clipped; above 0."""

    kind = "fixed"
    init = zero_init(FixedState)

    def update(
        self, state: FixedState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[FixedState, Clip]:
        """Clips `seen.grad_norm` to `max_norm`."""
        del learn
        norm = seen.grad_norm
        over = norm > self.max_norm
        limit = xp.where(over, self.max_norm, norm)
        zero = norm - norm
        scale = scale_to(limit, norm, over, xp=xp)
        return state, Clip(scale, zero + self.max_norm, zero, over)
