"""`NormCeiling`: notices that other code clips the gradients before the policy sees them.

`clip_grad_norm_(..., 1.0)` in the loop, or a trainer's own clipping, turns every larger norm into
1.0. The policy would then see no spike, and no warning sign before one.
"""

from __future__ import annotations

HITS = 20
"""Steps at the same highest norm after which it is taken for somebody's limit."""
_SAME = 2e-4
"""Relative difference: clipping rounds each gradient, and divides by the norm + 1e-6."""
_VALUES = 3
"""Different values needed among them: a loss whose gradient is constant repeats one exactly."""


class NormCeiling:
    """Counts the steps whose gradient norm is at the highest one so far."""

    def __init__(self) -> None:
        self._highest = 0.0
        self._hits = 0
        self._values: set[float] = set()
        self._said = False

    def add(self, norm: float) -> str | None:
        """Takes one step's norm; a warning at the step that makes it certain, else None."""
        if self._said or not norm > 0.0 or norm == float("inf"):
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
        self._said = True
        return (
            f"the gradient norm was {self._highest:.4g} at {HITS} steps and never above: something "
            "clips before the policy sees it, which hides spikes; remove clip_grad_norm_ from the "
            "loop, or the trainer's own clipping (max_grad_norm, gradient_clip_val, "
            "gradient_clipping), and set the limit in the policy: clip={'max_norm': ...}"
        )
