"""Divergence: the smoothed loss climbs away from the best level it ever had.

Needs no spike: a noisy ramp from 2 to 22 has none. The smoothed loss has to stand `rise` times
the noise above its best level *and* keep standing there for `patience` steps; the alarm is
latched and ends only when half of the rise is gone (hysteresis). The noise is the mean absolute
change from one loss to the next, which a trend does not inflate.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    rise: Any = 6.0
    """Rise of the smoothed loss above its best level, in units of the noise."""
    min_fraction: Any = 0.2
    """And at least this fraction of what the loss has fallen so far."""
    patience: Any = 30
    """Steps in a row above both that make the alarm."""
    ema_decay: Any = 0.95
    """Decay of the smoothed loss."""
    warmup_steps: Any = 50
    """Steps learnt before a rise counts."""


class State(NamedTuple):
    """O(1) memory."""

    count: Any
    smooth: Any
    best: Any
    top: Any
    noise: Any
    last: Any
    run: Any
    latched: Any


def init(config: Config) -> State:
    """No step seen."""
    del config
    zero, none = np.zeros((), np.float32), np.zeros((), np.int32)
    return State(
        none,
        zero,
        zero.copy(),
        zero.copy(),
        zero.copy(),
        zero.copy(),
        none.copy(),
        np.zeros((), bool),
    )


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Learns `seen.loss`, then compares the smoothed loss with the best."""
    learn, loss = seen.sound, seen.loss
    count = xp.where(seen.restart, 0, state.count)
    first, warm = count == 0, count < config.warmup_steps
    rate = numerics.complement(config.ema_decay, loss)
    smooth = numerics.ema(state.smooth, loss, rate, learn, xp=xp)
    smooth = xp.where(first & learn, loss, smooth)
    moved = xp.where(first, 0.0, xp.abs(loss - state.last))
    noise = numerics.ema(xp.where(first, 0.0, state.noise), moved, 0.02, learn, xp=xp)
    noise = xp.where(learn & (count == 1), moved, noise)
    best = xp.where(warm | (smooth < state.best), smooth, state.best)
    top = xp.where(warm | (smooth > state.top), smooth, state.top)
    rise = smooth - best
    far = (rise > config.rise * noise) & (rise > config.min_fraction * (top - best))
    near = ~(rise > 0.5 * (config.rise * noise))
    more = xp.where(state.run < config.patience, state.run + 1, state.run)
    run = xp.where(learn, xp.where(far & ~warm, more, 0), state.run)
    latched = (state.latched | (run >= config.patience)) & ~(near & learn) & ~seen.restart
    alarm = learn & latched
    cause = flag(alarm, Cause.DIVERGENCE, xp=xp)
    known = noise > 0
    z = xp.where(known & ~warm, rise / xp.where(known, noise, 1.0), 0.0)
    new = State(
        xp.where(learn & warm, count + 1, count),
        smooth,
        best,
        top,
        noise,
        xp.where(learn, loss, state.last),
        run,
        latched,
    )
    return new, Reading(alarm, alarm, cause, z)
