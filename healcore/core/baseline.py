"""Baselines that are robust to outliers, for rules that reject or average values.

A rule that learns only accepted values would reject every value after a lasting level shift. So
`watch_level` averages the raw values from the first rejection on. If most values are rejected and
they stay at one level, this level becomes the baseline (docs/detectors.md).

A plain mean of the first 25 norms (ZClip) is not robust: one norm of 1000 times the usual size
hides spikes for hundreds of steps. So `limit_outlier` limits a norm in the warm-up to ten times the
mean. A norm below a tenth of the mean restarts the warm-up: the earlier norms were outliers.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core.array_namespace import Flag, Float, Int, Number, xp
from healcore.core.ranges import whole

# The average covers about 15 values. A power of two makes the product exact.
_RATE = 0.125
# Largest variance of values at one level, in squares of the level. The standard deviation is 0.31
# for lognormal(0.3) noise, and above 1 for norms that double at each step and must be rejected.
_MAX_VARIANCE = 0.25
_OUTLIER_RATIO = 10.0  # ratio of an outlier to the mean of the warm-up


class ShiftConfig(NamedTuple):
    """Parameters of `watch_level`: how many rejections establish a new level.

    The count of rejections is leaky: a rejection adds `gain`, and an accepted value subtracts
    `forgive`. So a level with a few accepted values between the rejections is found too.
    """

    patience: Annotated[Number, whole(1, 1_000_000)] = 25
    """Consecutive rejections of similar values after which their level is accepted."""
    gain: Annotated[Number, whole(1, 1000)] = 4
    """Increase of the count per rejection. At 4 to 1 it grows if over 20 % are rejected."""
    forgive: Annotated[Number, whole(0, 1_000_000)] = 1
    """Decrease of the count per accepted value."""


class ShiftState(NamedTuple):
    """Count and statistics of recent rejections.

    The statistics distinguish a new level and an explosion: values at a new level are alike, and
    values of an explosion are not.
    """

    rejections: Int
    """Leaky count of rejections, each of which adds `gain`."""
    level: Float
    """Moving average of the raw values since the first rejection."""
    spread: Float
    """Variance of these values."""


def watch_level(
    config: ShiftConfig, state: ShiftState, value: Float, rejected: Flag, learn: Flag, restart: Flag
) -> tuple[ShiftState, Flag]:
    """Updates the rejections by one value, and decides whether the level has shifted.

    Without this, a rule that learns only accepted values rejects every value after a lasting shift.

        accepted   o o o o o                             o o o o   the new level is the baseline
        rejected             x x x x x x x x x x x x x x
        rejections 0 0 0 0 0 4 8 ...       patience * gain: escaped, if the values are at one level

    Args:
        config: when rejections establish a new level.
        state: earlier rejections.
        value: the raw value, finite, before any clipping.
        rejected: the rule rejects the value as an outlier.
        learn: the value counts. Elsewhere the state is unchanged, except by `restart`.
        restart: earlier rejections are forgotten first.

    Returns:
        The new state, and whether the values have shifted. Its `level` and `spread` are then the
        mean and the variance of the rule's new baseline.
    """
    rejected = rejected & learn
    rejections = xp.where(restart, 0, state.rejections)
    first = rejected & (rejections == 0)
    active = learn & (rejected | (rejections > 0))
    lower = rejections - config.forgive
    lower = xp.where(lower > 0, lower, 0)
    rejections = xp.where(rejected, rejections + config.gain, xp.where(learn, lower, rejections))

    before = xp.where(first, value, state.level)
    deviation = value - before
    level = before + xp.where(active, _RATE * deviation, 0.0)
    square = xp.product(deviation, value - level)
    spread = xp.where(first, 0.0, state.spread)
    spread = spread + xp.where(active, _RATE * (square - spread), 0.0)
    level, spread = xp.flush(level), xp.flush(spread)

    at_one_level = spread <= _MAX_VARIANCE * (level * level)
    escaped = rejected & (rejections >= config.patience * config.gain) & at_one_level
    # The bound prevents an overflow.
    limit = 2 * config.patience * config.gain
    rejections = xp.where(escaped, 0, xp.where(rejections > limit, limit, rejections))
    return ShiftState(rejections, level, spread), escaped


def limit_outlier(value: Float, mean: Float, count: Int, warm: Flag) -> tuple[Float, Flag]:
    """Keeps a norm of a warm-up from spoiling the mean.

    Args:
        value: the norm.
        mean: mean of the norms before it.
        count: number of the norms before it.
        warm: the warm-up is not over. Afterwards the norm is not limited.

    Returns:
        The norm, limited to ten times the mean; and whether to forget the norms before it, because
        this one is below a tenth of their mean.
    """
    judged = warm & (count > 0)
    ceiling = _OUTLIER_RATIO * mean
    value = xp.where(judged & (value > ceiling), ceiling, value)
    return value, judged & (_OUTLIER_RATIO * value < mean)
