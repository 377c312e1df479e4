"""The learning-rate multiplier: a cut, a hold, and a ramp back towards the schedule.

With `LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import LrConfig

_MOST = 1e12  # limit of `LrState.broken`, above the rate of any schedule
RESTART_RATIO = 0.5  # a rate below this share of the last step's rate begins another schedule


class LrState(NamedTuple):
    """The multiplier, and its position in hold and ramp."""

    scale: Any  # float32: the multiplier in force
    low: Any  # float32: rate after the last cut, at which the ramp begins; 0 = never cut
    broken: Any  # float32: rate before the last cut, raised by long health; 0 = never cut
    peak: Any  # float32: highest rate of the schedule since the last cut or sudden fall; 0 = none
    rate: Any  # float32: the schedule's rate at the last step; 0 = no step
    hold: Any  # int32: remaining steps of the hold
    ramp: Any  # int32: remaining steps of the ramp


def init() -> LrState:
    """A multiplier of 1."""
    zero_float, zero_int = np.zeros((), np.float32), np.zeros((), np.int32)
    floats = (zero_float.copy() for _ in range(4))
    return LrState(np.ones((), np.float32), *floats, hold=zero_int, ramp=zero_int.copy())


def update(
    config: LrConfig,
    state: LrState,
    cut: Any,
    healthy: Any,
    in_incident: Any,
    refund: Any,
    rate: Any,
    *,
    xp: Any,
) -> LrState:
    """Updates the multiplier by one step; only healthy steps count for hold and ramp.

    A cut multiplies the multiplier in force. In an incident the multiplier stays, except that the
    ceiling lowers it if the schedule rises. `refund` (long health) raises the limit. `rate` is the
    schedule's learning rate at this step, or None for a constant rate of 1.
    """
    one = state.scale - state.scale + 1.0
    rate = one if rate is None else xp.where((rate > 0) & (rate < _MOST), rate, one)
    # After a window with a wrong, high rate, its low multiplier must not stay in force.
    same_schedule = (rate >= RESTART_RATIO * state.rate) & ~cut
    peak = xp.where(same_schedule & (state.peak > rate), state.peak, rate)
    cut_scale = numerics.larger(config.factor * state.scale, config.floor, xp=xp)
    # A floor above the multiplier does not raise the multiplier.
    cut_scale = numerics.smaller(cut_scale, state.scale, xp=xp)
    rate_after_cut = xp.where(cut, numerics.product(cut_scale, rate, xp=xp), state.low)
    rate_before_cut = xp.where(
        refund, numerics.quotient(state.broken, config.factor * one, xp=xp), state.broken
    )
    rate_before_cut = numerics.smaller(rate_before_cut, _MOST, xp=xp)
    rate_before_cut = xp.where(cut, numerics.product(state.scale, rate, xp=xp), rate_before_cut)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)

    holding = hold > 0
    advances = healthy & ~cut
    ramp = xp.where(advances & ~holding, numerics.sub_one(ramp, xp=xp), ramp)
    hold = xp.where(advances & holding, hold - 1, hold)
    limited = (rate_before_cut > 0) & (config.ceiling * one > 0)
    top = numerics.quotient(numerics.product(config.ceiling, rate_before_cut, xp=xp), peak, xp=xp)
    top = xp.where(limited & (top < 1), top, 1.0)
    bottom = numerics.smaller(numerics.quotient(rate_after_cut, rate, xp=xp), top, xp=xp)
    # A division by ramp_steps is not exact in XLA if it is a constant (numerics). 1 / n rounds to
    # the same float32 from Python's double and from an array.
    share = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
    ramp_share = numerics.as_float(config.ramp_steps - ramp, xp=xp) * share
    ramped = bottom + numerics.product(top - bottom, ramp_share, xp=xp)
    done = ~holding & (ramp == 0)
    scale = xp.where(done, top, xp.where(holding, bottom, ramped))
    scale = xp.where(in_incident, numerics.smaller(state.scale, top, xp=xp), scale)
    scale = xp.where(cut, cut_scale, scale)
    return LrState(
        numerics.settle(scale, xp=xp), rate_after_cut, rate_before_cut, peak, rate, hold, ramp
    )


def limited(config: LrConfig, state: LrState, limit: Any, rate: Any, *, xp: Any) -> LrState:
    """Limits the rate to `limit`, as after a cut to this rate.

    `rate` is the schedule's current learning rate, or None for a constant rate of 1.
    """
    one = state.scale - state.scale + 1.0
    rate = one if rate is None else xp.where((rate > 0) & (rate < _MOST), rate, one)
    limit = xp.where(limit > 0, limit, rate)
    scale = numerics.smaller(numerics.quotient(limit, rate, xp=xp), state.scale, xp=xp)
    share = xp.where(config.ceiling * one > 0, config.ceiling * one, 1.0)
    rate_before_cut = numerics.smaller(numerics.quotient(limit, share, xp=xp), _MOST, xp=xp)
    zero = state.hold - state.hold
    return LrState(
        numerics.settle(scale, xp=xp),
        limit,
        rate_before_cut,
        rate,
        rate,
        zero + config.hold_steps,
        zero + config.ramp_steps,
    )
