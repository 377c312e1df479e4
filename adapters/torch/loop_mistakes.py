"""Detects that other code clips the gradients, without a host sync."""

from __future__ import annotations

import math

HITS = 20
"""Steps at one maximum norm after which this norm counts as another code's limit."""
_SAME = 2e-4
"""Relative tolerance of equal norms: clipping rounds gradients and divides by the norm + 1e-6."""
_VALUES = 3
"""Distinct norms required within the tolerance: a constant gradient repeats one norm exactly."""


class NormCeiling:
    """Detects that other code clips the gradients before the policy sees them.

    `clip_grad_norm_(..., 1.0)`, or a trainer's own clipping, turns every larger norm into 1.0. The
    policy would then see neither a spike nor the growth before a spike.
    """

    def __init__(self) -> None:
        self._highest = 0.0
        self._hits = 0
        self._values: set[float] = set()
        self._has_warned = False

    def add(self, norm: float) -> str | None:
        """Adds one step's norm. Returns a warning at the step that proves the limit, else None."""
        if self._has_warned or not 0.0 < norm < math.inf:
            return None
        if norm > self._highest * (1 + _SAME):
            self._highest, self._hits, self._values = norm, 0, set()
        if norm < self._highest * (1 - _SAME):
            return None
        self._hits += 1
        if len(self._values) < _VALUES:
            self._values.add(norm)
        if self._hits < HITS or len(self._values) < _VALUES:
            return None
        self._has_warned = True
        return (
            f"the gradient norm was {self._highest:.4g} at {HITS} steps and never above: other "
            "code clips before the policy, which hides spikes; remove clip_grad_norm_ from the "
            "loop, or the trainer's own clipping (max_grad_norm, gradient_clip_val, "
            "gradient_clipping), and set the limit in the policy: clip={'max_norm': ...}"
        )
