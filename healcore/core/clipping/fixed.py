"""Fixed clipping: the norm is brought down to one absolute limit (Pascanu et al., 2013).

The rule of `torch.nn.utils.clip_grad_norm_` and `optax.clip_by_global_norm`. It has no baseline and
so no escape: norms that stay above `max_norm` are clipped for good, as the user asked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core.clipping.verdict import Clip, scale_to
from healcore.core.signals import Observed


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
