"""Warm-up that one outlier cannot spoil: shared by the rules that average norms.

A plain mean over the first 25 norms is what ZClip publishes. One norm of x1000 among them makes
the baseline so high that nothing looks like a spike for hundreds of steps. So while warming up a
norm above ten times the mean so far enters as ten times the mean, and one below a tenth of it
starts the warm-up again: then the first norms were the outliers. Norms within a factor of
ten of their mean, which is all that the published rule is meant for, are averaged as published.
"""

from __future__ import annotations

from typing import Any

from healcore.core import numerics

_FACTOR = 10.0


def step(gap: Any, count: Any, rate: Any, warm: Any, *, xp: Any) -> Any:
    """What to add to an average: `gap / count` while warming up (a plain mean), else `rate * gap`.

    Args:
        gap: float32, the value less the average.
        count: float32, values averaged, this one included; at least 1.
        rate: weight of the moving average.
        warm: bool, warming up.
        xp: the array namespace.
    """
    plain = numerics.quotient(gap, count, xp=xp)
    return xp.where(warm, plain, numerics.product(rate, gap, xp=xp))


def robust(value: Any, mean: Any, count: Any, warm: Any, *, xp: Any) -> tuple[Any, Any]:
    """What to learn of one norm.

    Args:
        value: float32, positive and finite.
        mean: float32, mean of the norms so far.
        count: int32, how many there were.
        warm: bool, warming up.
        xp: the array namespace.

    Returns:
        The value to learn, and a bool: forget what came before it.
    """
    judged = warm & (count > 0)
    ceiling = _FACTOR * mean
    value = xp.where(judged & (value > ceiling), ceiling, value)
    return value, judged & (_FACTOR * value < mean)
