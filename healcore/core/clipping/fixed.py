"""The result of every clipping rule, and fixed clipping.

Fixed clipping brings the norm down to one absolute limit (Pascanu et al., 2013). It is the rule of
`torch.nn.utils.clip_grad_norm_` and `optax.clip_by_global_norm`. It has no baseline and so no
escape: norms that stay above `max_norm` are clipped for good, as the user asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import numerics
from healcore.core.signals import Observed

EPSILON = 1e-6  # added to the norm, as torch and papers do


class Clip(NamedTuple):
    """One step's clipping: arrays of the norm's shape, 0-d, or (n,) for per-tensor rules."""

    scale: Any  # float32 in [0, 1]: factor on the gradient; 1 = untouched
    threshold: Any  # float32: larger norms are brought down to it; 0 = none in force (warm-up)
    z: Any  # float32: z-score of the norm; 0 in warm-up and for rules without a spread
    clipped: Any  # bool


def scale_to(limit: Any, norm: Any, over: Any, *, xp: Any) -> Any:
    """Factor from `norm` to `limit` where `over`, else exactly 1."""
    target = xp.where(over, limit, norm)
    scale = numerics.quotient(target, norm + EPSILON, xp=xp)
    return numerics.settle(xp.where(over, scale, 1.0), xp=xp)


class FixedState(NamedTuple):
    """Empty: the rule has no memory."""


class FixedConfig(NamedTuple):
    """The limit."""

    max_norm: Any = 1.0
    """Largest gradient norm that passes untouched; above 0."""

    def init(self, *, groups: int = 0) -> FixedState:
        """An empty state."""
        del groups
        return FixedState()

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
