"""A warm-up that is robust to outliers, for the rules that average norms.

In a plain mean of the first 25 norms (ZClip) one of x1000 hides spikes for hundreds of steps. So a
norm above ten times the mean so far enters as ten times the mean, and one below a tenth of it
restarts the warm-up: the norms before it were the outliers.
"""

from __future__ import annotations

from typing import Any

from healcore.core import numerics

_FACTOR = 10.0


def step(gap: Any, count: Any, rate: Any, warm: Any, *, xp: Any) -> Any:
    """The change of an average: `gap / count` while `warm` (a plain mean), else `rate * gap`.

    `gap` is the value less the average, `count` (float32) includes the value.
    """
    plain = numerics.quotient(gap, count, xp=xp)
    return xp.where(warm, plain, numerics.product(rate, gap, xp=xp))


def robust(value: Any, mean: Any, count: Any, warm: Any, *, xp: Any) -> tuple[Any, Any]:
    """The value to learn from a norm, and whether to forget the `count` norms before it."""
    judged = warm & (count > 0)
    ceiling = _FACTOR * mean
    value = xp.where(judged & (value > ceiling), ceiling, value)
    return value, judged & (_FACTOR * value < mean)
