"""The result of a clipping rule."""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import numerics

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
