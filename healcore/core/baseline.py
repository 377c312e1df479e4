"""Baselines that outliers do not spoil, for every rule that rejects or averages values.

A rule that learns only what it accepts rejects every value after a true level shift. So
`watch_level` keeps a short average of the raw values from the first rejection on. Once most values
are rejected and they stay at one level instead of running away, that level is the new baseline
(docs/detectors.md).

In a plain mean of the first 25 norms (ZClip) one norm of x1000 hides spikes for hundreds of steps.
So in a warm-up `robust` limits a norm to ten times the mean so far. A norm below a tenth of the
mean restarts the warm-up: the norms before it were the outliers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics

# About the last 15 values count. A power of two, so that the product is exact.
_RATE = 0.125
# Variance, in squares of the level, up to which values stay at one level: lognormal(0.3) noise has
# a standard deviation of 0.31, norms that double at each step (to be rejected) of more than 1.
_STANDING = 0.25
_OUTLIER = 10.0  # ratio to the mean of a warm-up


class ShiftConfig(NamedTuple):
    """When repeated rejections become a new level."""

    patience: Any = 25
    """Rejections in a row, of values that vary little, after which the new level is accepted."""
    gain: Any = 4
    """Weight of a rejection against `forgive`: 4 to 1 escapes wherever over 20 % are rejected."""
    forgive: Any = 1
    """Decrease of the count of rejections for each accepted value."""


class ShiftState(NamedTuple):
    """Memory of the rejections."""

    run: Any  # int32: leaky count of rejections, `gain` each
    level: Any  # float32: mean of the raw values since the run began
    spread: Any  # float32: their variance


class Shift(NamedTuple):
    """Whether one value shows that the level has shifted."""

    escaped: Any  # bool: it has; `level` and `spread` are the new baseline
    level: Any
    spread: Any


def no_rejections(shape: tuple[int, ...] = ()) -> ShiftState:
    """A state without rejections."""
    zero = np.zeros(shape, np.float32)
    return ShiftState(np.zeros(shape, np.int32), zero, zero.copy())


def watch_level(
    config: ShiftConfig,
    state: ShiftState,
    value: Any,
    rejected: Any,
    learn: Any,
    restart: Any,
    *,
    xp: Any,
) -> tuple[ShiftState, Shift]:
    """Takes one finite raw value, and whether the rule rejected it.

    Where `learn` is false nothing changes; where `restart` holds, earlier rejections are forgotten.
    """
    rejected = rejected & learn
    run = xp.where(restart, 0, state.run)
    first = rejected & (run == 0)
    active = learn & (rejected | (run > 0))
    lower = run - config.forgive
    lower = xp.where(lower > 0, lower, 0)
    run = xp.where(rejected, run + config.gain, xp.where(learn, lower, run))

    before = xp.where(first, value, state.level)
    deviation = value - before
    level = before + xp.where(active, _RATE * deviation, 0.0)
    square = numerics.product(deviation, value - level, xp=xp)
    spread = xp.where(first, 0.0, state.spread)
    spread = spread + xp.where(active, _RATE * (square - spread), 0.0)
    level, spread = numerics.settle(level, xp=xp), numerics.settle(spread, xp=xp)

    standing = spread <= _STANDING * (level * level)
    escaped = rejected & (run >= config.patience * config.gain) & standing
    # Bounded, so that it does not overflow.
    limit = 2 * config.patience * config.gain
    run = xp.where(escaped, 0, xp.where(run > limit, limit, run))
    return ShiftState(run, level, spread), Shift(escaped, level, spread)


def robust(value: Any, mean: Any, count: Any, warm: Any, *, xp: Any) -> tuple[Any, Any]:
    """The value to learn from a norm, and whether to forget the `count` norms before it."""
    judged = warm & (count > 0)
    ceiling = _OUTLIER * mean
    value = xp.where(judged & (value > ceiling), ceiling, value)
    return value, judged & (_OUTLIER * value < mean)
