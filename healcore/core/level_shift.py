"""Telling a true level shift from a spike: the escape of every rule that rejects values.

A rule that learns only what it accepts is blind to its own mistakes: after a true shift of the
level it rejects every later value (published ZClip and AXLearn do so for ever, AdaGC for
hundreds of steps). Beside the baseline this keeps a short average of the *raw* values since the
rejections began. When rejections have become the rule, and those raw values stand at one level
instead of running away, that level is the new baseline.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics

# 1/8 is a power of two, so that the product is exact: about the last 15 values count.
_RATE = 0.125
# A standard deviation of half the level still counts as "standing": lognormal(0.3) noise has
# 0.31. Norms that double at each step have more than 1, and must go on being rejected.
_STANDING = 0.25


class ShiftConfig(NamedTuple):
    """When rejections have become the rule."""

    patience: Any = 25
    """Rejections in a row that make the escape, if the values stand still."""
    gain: Any = 4
    """Weight of a rejection against `forgive`: 4 to 1 escapes wherever over 20 % are rejected."""
    forgive: Any = 1
    """What one accepted value takes off the run."""


class ShiftState(NamedTuple):
    """O(1) memory of the rejections."""

    run: Any
    """int32: leaky count of rejections, `gain` each."""
    level: Any
    """float32: mean of the raw values since the run began."""
    spread: Any
    """float32: their variance."""


class Shift(NamedTuple):
    """Whether one value shows that the level has shifted."""

    escaped: Any
    """bool: the level has shifted; take `level` and `spread` as the new baseline."""
    level: Any
    spread: Any


def init(shape: tuple[int, ...] = ()) -> ShiftState:
    """A watch that has seen nothing."""
    zero = np.zeros(shape, np.float32)
    return ShiftState(np.zeros(shape, np.int32), zero, zero.copy())


def update(
    config: ShiftConfig,
    state: ShiftState,
    value: Any,
    rejected: Any,
    learn: Any,
    restart: Any,
    *,
    xp: Any,
) -> tuple[ShiftState, Shift]:
    """Takes one raw value and whether the rule rejected it.

    Args:
        config: thresholds.
        state: the watch.
        value: float32, finite.
        rejected: bool.
        learn: bool; where false nothing changes.
        restart: bool; where true the run is forgotten first.
        xp: the array namespace.
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
    # Beyond the limit a run only needs to stay there: it may not overflow.
    limit = 2 * config.patience * config.gain
    run = xp.where(escaped, 0, xp.where(run > limit, limit, run))
    return ShiftState(run, level, spread), Shift(escaped, level, spread)
