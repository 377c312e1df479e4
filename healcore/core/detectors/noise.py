"""The noise of a signal: the unit in which the detectors of spikes and trends measure a rise.

A detector calls `begin_noise`, compares its value with `noise_unit`, and then calls `learn_noise`.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.core import numerics
from healcore.core.array_namespace import Flag, Float, Int, Number, xp

SMALL_NOISE = 0.001
"""Smallest noise, as a share of the level: a smaller change is never an outlier."""
NOISE_WINDOW = 36
"""Number of values that determine the noise."""


class NoiseState(NamedTuple):
    """Noise around a moving level that need not be known.

    The noise is the mean absolute difference of successive values. Neither a trend nor a plateau
    adds to it (von Neumann et al., 1941). A repeated value is not learnt, so the noise of a rounded
    log is at least its rounding step.
    """

    count: Int
    """Values learnt, at most the window."""
    last: Float
    """The last value."""
    noise: Float
    """Mean absolute difference of successive values."""


def begin_noise(state: NoiseState, value: Float, restart: Flag) -> tuple[NoiseState, Flag]:
    """Prepares the state for a value. A restart resets the count and keeps the noise.

    Args:
        state: the state before the value.
        value: float32 0-d.
        restart: whether a change was expected at this step, bool 0-d.

    Returns:
        The state, and whether the value is the first one, bool 0-d. The first value has no
        difference to an earlier one.
    """
    count = xp.where(restart, 0, state.count)
    first = count == 0
    return state._replace(count=count, last=xp.where(first, value, state.last)), first


def noise_unit(state: NoiseState, level: Float, min_share: Number) -> Float:
    """Returns the unit in which spikes and trends are measured: the noise, with a floor.

    Without the floor, a run that is almost without noise would raise an alarm at each small rise.

    Args:
        state: the noise.
        level: the level of the values, float32 0-d.
        min_share: smallest noise, as a share of the level.

    Returns:
        float32 0-d, in the unit of the values. 0 if all values were zero.
    """
    return xp.maximum(state.noise, xp.product(min_share, abs(level)))


def learn_noise(
    state: NoiseState, value: Float, allowed: Flag, max_jump: Float, window: Number
) -> tuple[NoiseState, Float]:
    """Learns a value: its difference to the last value moves the noise.

    Args:
        state: the state from `begin_noise`.
        value: float32 0-d, finite where `allowed` holds.
        allowed: whether the value is learnt, bool 0-d.
        max_jump: largest difference that counts, float32 0-d. One outlier would otherwise raise
            the noise, and hide the outliers after it.
        window: number of values that determine the noise.

    Returns:
        The new state, and the weight of this value, float32 0-d: 1 / count, but at least
        1 / window. The weight may be infinite where `allowed` does not hold.
    """
    value = xp.where(allowed, value, state.last)  # without a jump the noise stays
    count = xp.minimum(state.count + allowed, window)
    weight = xp.quotient(numerics.one_like(value), xp.as_float(count))
    jump = abs(value - state.last)
    step = xp.product(weight, xp.minimum(jump, max_jump) - state.noise)
    noise = state.noise + xp.where(jump > 0, step, 0.0)
    return NoiseState(count, value, xp.flush(noise)), weight
