"""Divergence: the smoothed loss is above the best it ever had, and does not come back.

It needs no spike: a noisy ramp from 2 to 22 has none. For `patience` steps, net of steps of
recovery, the trend has to be above the best level (beyond the noise, and by a share of all
improvement so far) and no lower than its own slower average. The alarm is latched until half of the
excess is gone. A rise after a rise counts little in the noise, so that a ramp is not taken for it.
Best and top are forgotten slowly, so that the detector still works after a true level shift.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

# Ranges: values that serve as well (docs/detectors.md).
_TREND = 1.0 / 16.0  # weight in the trend
_SLOW = 1.0 / 64.0  # weight in the slower one
_NOISE = 0.03
_REPEAT = 0.2  # share of it for a rise after a rise; 0.15 to 0.3
_WINSOR = 8.0  # one step counts at most this many noise scales
_FLAT = 0.25  # noise scales below the slower trend that are still no recovery
_RELEASE = 0.5  # of the threshold: the latch opens
_CREEP = 1.0 / 2048.0  # rate at which best and top are forgotten
_LONG_SHARE = 0.5  # the long noise scale counts this much; 0 to 0.8
_LONG_START = 2.5
_LONG = 1.0 / 512.0
_ROUNDING = 2.0**-18  # noise below this share of the loss is float32 rounding
_BLANK = 2.0**-12  # and then a rise counts from this share of it on
_COUNTED = 1 << 22


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    rise: Any = 8.0
    """Noise scales of the trend above the best level; 7 to 9 serve alike."""
    given_back: Any = 0.15
    """And this part of the improvement so far given back; 0.1 to 0.25."""
    patience: Any = 56
    """Steps, net of recovering ones, that make the alarm; 48 to 72."""
    warmup_steps: Any = 32
    """Steps learnt before a rise counts."""


class State(NamedTuple):
    """Smoothed losses, noise and the alarm."""

    count: Any  # int32: steps learnt
    trend: Any  # float32: smoothed loss
    slow: Any  # float32: smoothed trend
    noise: Any  # float32: mean absolute residual of the last steps
    long_noise: Any  # float32: mean absolute residual of the whole run, recent steps weighing more
    best: Any  # float32: lowest slow trend
    top: Any  # float32: highest slow trend
    residual: Any  # float32: the last residual, for its sign
    run: Any  # int32: elevated steps, net of recovering ones
    latched: Any  # bool: the alarm is on


def init(config: Config) -> State:
    """No step seen."""
    del config
    none = np.zeros((), np.int32)
    floats = (np.zeros((), np.float32) for _ in range(7))
    return State(none, *floats, run=none.copy(), latched=np.zeros((), bool))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Learns `seen.loss`, then compares the trend with the best level."""
    learn, loss = seen.finite, seen.loss
    count = xp.where(seen.restart, 0, state.count)
    first, warm = count == 0, count < config.warmup_steps
    one = loss - loss + 1.0
    share = numerics.quotient(one, numerics.as_float(count + 1, xp=xp), xp=xp)
    trend = xp.where(first, loss, state.trend)
    slow = xp.where(first, loss, state.slow)

    most = _WINSOR * state.noise
    free = warm | (state.noise <= _ROUNDING * xp.abs(trend))
    residual = loss - trend
    residual = xp.where(~free & (residual > most), most, residual)
    residual = xp.where(~free & (residual < -most), -most, residual)
    size = xp.abs(residual)
    weight = numerics.larger(share, _TREND, xp=xp)
    trend = trend + numerics.product(weight, residual, xp=xp)
    weight = numerics.larger(share, _SLOW, xp=xp)
    slow = slow + numerics.product(weight, trend - slow, xp=xp)

    repeats = (residual > 0) & (state.residual > 0) & (residual > state.noise)
    weight = xp.where(repeats, _NOISE * _REPEAT, _NOISE * one)
    weight = xp.where(warm, numerics.larger(share, weight, xp=xp), weight)
    noise = state.noise + numerics.product(weight, size - state.noise, xp=xp)
    weight = numerics.smaller(_LONG_START * share, 1.0, xp=xp)
    weight = numerics.larger(weight, _LONG, xp=xp)
    long_noise = state.long_noise + numerics.product(weight, size - state.long_noise, xp=xp)
    scale = numerics.larger(noise, _LONG_SHARE * long_noise, xp=xp)

    best = state.best + numerics.product(_CREEP, slow - state.best, xp=xp)
    best = xp.where(warm | (slow < best), slow, best)
    top = state.top + numerics.product(_CREEP, slow - state.top, xp=xp)
    top = xp.where(warm | (slow > top), slow, top)
    excess = trend - best
    threshold = numerics.larger(config.rise * scale, config.given_back * (top - best), xp=xp)
    threshold = numerics.larger(threshold, _BLANK * xp.abs(best), xp=xp)

    elevated = ~warm & (excess > threshold)
    recovering = slow - trend > _FLAT * scale
    more = xp.where(state.run < 2 * config.patience, state.run + 1, state.run)
    run = xp.where(elevated & ~recovering, more, numerics.sub_one(state.run, xp=xp))
    back = first | (excess < _RELEASE * threshold)
    run = xp.where(back, 0, run)
    latched = (state.latched | (run >= config.patience)) & ~back

    alarm = learn & latched & ~recovering
    known = ~warm & (scale > 0)
    z = numerics.quotient(excess, xp.where(known, scale, 1.0), xp=xp)
    z = xp.where(known & learn, z, 0.0)
    after = State(
        count=xp.where(count < _COUNTED, count + 1, count),
        trend=numerics.settle(trend, xp=xp),
        slow=numerics.settle(slow, xp=xp),
        noise=numerics.settle(noise, xp=xp),
        long_noise=numerics.settle(long_noise, xp=xp),
        best=numerics.settle(best, xp=xp),
        top=numerics.settle(top, xp=xp),
        residual=numerics.settle(residual, xp=xp),
        run=run,
        latched=latched,
    )
    kept = state._replace(count=count, latched=state.latched & ~seen.restart)
    new = State(*(xp.where(learn, a, b) for a, b in zip(after, kept, strict=True)))
    return new, Reading(alarm, alarm, flag(alarm, Cause.DIVERGENCE, xp=xp), z)
