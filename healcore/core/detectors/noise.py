"""Noise of a signal: the mean absolute difference of successive values.

It measures noise around a moving level without knowing the level: neither a trend nor a plateau
adds to it (von Neumann et al., 1941). A repeated value is not learnt, so the noise of a rounded log
is at least its rounding step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import numerics
from healcore.core.tree import Float, Int

SMALL = 0.001
"""Smallest noise, as a share of the level: a smaller change is never an outlier."""
WINDOW = 36
"""Number of values that determine the noise."""


class NoiseState(NamedTuple):
    """Noise of the values so far."""

    count: Int  # values learnt, at most the window
    last: Float  # the last value
    noise: Float  # mean absolute difference of successive values


def begin(state: NoiseState, value: Any, restart: Any, *, xp: Any) -> tuple[NoiseState, Any]:
    """Prepares the state for `value`; returns the state, and whether `value` is the first one.

    A restart resets the count and keeps the noise.
    """
    count = xp.where(restart, 0, state.count)
    first = count == 0
    return state._replace(count=count, last=xp.where(first, value, state.last)), first


def unit(state: NoiseState, level: Any, min_share: Any, *, xp: Any) -> Any:
    """The noise, but at least the share `min_share` of the level; 0 if all values were zero."""
    return xp.maximum(state.noise, numerics.product(min_share, xp.abs(level), xp=xp))


def learn(
    state: NoiseState, value: Any, allowed: Any, max_jump: Any, window: Any, *, xp: Any
) -> tuple[NoiseState, Any]:
    """Learns a value where `allowed`; a difference counts for at most `max_jump`.

    Also returns the weight of this value: 1 / count, but at least 1 / window. The weight may be
    infinite where `allowed` does not hold.
    """
    value = xp.where(allowed, value, state.last)  # without a jump the noise stays
    count = xp.minimum(state.count + allowed, window)
    weight = xp.reciprocal(numerics.as_float(count, xp=xp))
    jump = xp.abs(value - state.last)
    step = numerics.product(weight, xp.minimum(jump, max_jump) - state.noise, xp=xp)
    noise = state.noise + xp.where(jump > 0, step, 0.0)
    return NoiseState(count, value, numerics.settle(noise, xp=xp)), weight
