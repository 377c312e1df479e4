"""Divergence: the smoothed loss stays above the best level that it ever had.

It needs no spike: a noisy ramp from 2 to 22 has none. The trend has to be above its best by `rise`
times the noise, and by the share `HIGH` of its highest excess, for `patience` steps. The alarm
lasts for at most as many steps: then the present level is the best level, and a further rise is a
new alarm.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.detectors import noise
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

HIGH = 0.5  # share of its highest excess at which the trend still counts as high


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    rise: Any = 6.0
    """Height of the trend above the best level, in units of the noise. One step counts at most as
    much."""
    patience: Any = 72
    """Steps, net of steps of recovery, that make the alarm."""
    window: Any = noise.WINDOW
    """Steps learnt before a rise counts, and the reciprocal weight of a step in the trend."""


class State(NamedTuple):
    """The trend, its best and its highest level, and the steps of elevation."""

    values: noise.NoiseState
    trend: Any  # float32: smoothed loss
    best: Any  # float32: lowest trend
    peak: Any  # float32: highest trend since it left the best level
    run: Any  # int32: elevated steps, net of recovering ones


def init(config: Config) -> State:
    """No step seen."""
    del config
    zero = np.zeros((), np.float32)
    return State(noise.init(), zero, zero.copy(), zero.copy(), np.zeros((), np.int32))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Learns `seen.loss`, then compares the trend with the best level."""
    learn, loss = seen.finite, seen.loss
    values = noise.begin(state.values, loss, seen.restart, xp=xp)
    first, warm = values.count == 0, values.count < config.window
    trend = xp.where(first, loss, state.trend)
    unit = noise.unit(values, trend, noise.SMALL, xp=xp)
    known = unit > 0
    threshold = numerics.product(config.rise, unit, xp=xp)
    most = xp.where(known, threshold, numerics.HUGE)
    learnt, weight = noise.learn(values, loss, most, config.window, xp=xp)

    off = numerics.larger(numerics.smaller(loss - trend, most, xp=xp), -most, xp=xp)
    trend = trend + numerics.product(weight, off, xp=xp)
    best = xp.where(warm, trend, numerics.smaller(trend, state.best, xp=xp))
    excess = trend - best
    high = excess > threshold
    peak = xp.where(high, numerics.larger(trend, state.peak, xp=xp), trend)
    elevated = high & (excess > HIGH * (peak - best))
    run = xp.where(elevated, state.run + 1, numerics.sub_one(state.run, xp=xp))
    run = xp.where(high, run, 0)
    alarm = learn & elevated & (run >= config.patience)
    over = run >= config.patience + config.patience

    z = numerics.quotient(excess, xp.where(known, unit, 1.0), xp=xp)
    z = xp.where(known & ~warm & learn, z, 0.0)
    values = noise.NoiseState(*(xp.where(learn, a, b) for a, b in zip(learnt, values, strict=True)))
    new = State(
        values,
        xp.where(learn, numerics.settle(trend, xp=xp), state.trend),
        xp.where(learn, numerics.settle(xp.where(over, trend, best), xp=xp), state.best),
        xp.where(learn, numerics.settle(peak, xp=xp), state.peak),
        xp.where(learn, xp.where(over, 0, run), state.run),
    )
    return new, Reading(alarm, alarm, flag(alarm, Cause.DIVERGENCE, xp=xp), z)
