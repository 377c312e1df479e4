"""The learning-rate multiplier: a cut, a hold, and a ramp back towards the schedule.

With `LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import numerics
from healcore.core.engine.config import LrConfig
from healcore.core.tree import Float, Int

_MOST = 1e12  # limit of `LrState.broken`, above the rate of any schedule
RESTART_RATIO = 0.5  # a rate below this share of the last step's rate begins another schedule


class LrState(NamedTuple):
    """The multiplier, and its position in hold and ramp."""

    scale: Float  # the multiplier in force
    low: Float  # rate after the last cut, at which the ramp begins; 0 = never cut
    broken: Float  # rate before the last cut, raised by long health; 0 = never cut
    peak: Float  # highest rate of the schedule since the last cut or sudden fall; 0 = none
    rate: Float  # the schedule's rate at the last step; 0 = no step
    hold: Int  # remaining steps of the hold
    ramp: Int  # remaining steps of the ramp


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
    ceiling lowers it if the schedule rises. `cut` is None if no rule cuts: the host alone limits
    the rate. `refund` (long health) raises the limit. `rate` is the schedule's learning rate at
    this step, or None for a constant rate of 1.
    """
    if cut is None and not may_limit(config):
        return state
    rate = _known(rate, state, xp=xp)
    broken = xp.where(refund, numerics.quotient(state.broken, config.factor, xp=xp), state.broken)
    broken = xp.minimum(broken, _MOST)
    # After a wrong, high rate its low multiplier must not stay in force.
    keeps_peak = (rate >= RESTART_RATIO * state.rate) & (state.peak > rate)
    if cut is None:
        peak = xp.where(keeps_peak, state.peak, rate)
        scale = numerics.settle(_limit(config, broken, peak, xp=xp), xp=xp)
        return state._replace(scale=scale, broken=broken, peak=peak, rate=rate)

    advances = healthy & ~cut
    cut_scale = xp.maximum(config.factor * state.scale, config.floor)
    # A floor above the multiplier does not raise the multiplier.
    cut_scale = xp.minimum(cut_scale, state.scale)
    low = xp.where(cut, numerics.product(cut_scale, rate, xp=xp), state.low)
    broken = xp.where(cut, numerics.product(state.scale, rate, xp=xp), broken)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)
    peak = xp.where(keeps_peak & ~cut, state.peak, rate)

    holding = hold > 0
    ramp = numerics.sub_one(ramp + (holding | ~advances), xp=xp)
    hold = xp.where(advances & holding, hold - 1, hold)
    top = _limit(config, broken, peak, xp=xp) if may_limit(config) else 1.0
    bottom = xp.minimum(numerics.quotient(low, rate, xp=xp), top)
    # A division by ramp_steps is not exact in XLA if it is a constant (numerics). 1 / n rounds to
    # the same float32 from Python's double and from an array.
    part = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
    ramp_share = numerics.as_float(config.ramp_steps - ramp, xp=xp) * part
    ramped = bottom + numerics.product(top - bottom, ramp_share, xp=xp)
    scale = xp.where(holding, bottom, xp.where(ramp == 0, top, ramped))
    scale = xp.where(in_incident, xp.minimum(state.scale, top), scale)
    scale = xp.where(cut, cut_scale, scale)
    return LrState(numerics.settle(scale, xp=xp), low, broken, peak, rate, hold, ramp)


def limited(config: LrConfig, state: LrState, limit: Any, rate: Any, *, xp: Any) -> LrState:
    """Limits the rate to `limit`, as after a cut to this rate; `rate` is as in `update`."""
    one, rate = _known(None, state, xp=xp), _known(rate, state, xp=xp)
    limit = xp.where(limit > 0, limit, rate)
    scale = xp.minimum(numerics.quotient(limit, rate, xp=xp), state.scale)
    share = xp.where(config.ceiling * one > 0, config.ceiling * one, 1.0)
    broken = xp.minimum(numerics.quotient(limit, share, xp=xp), _MOST)
    zero = state.hold - state.hold
    hold, ramp = zero + config.hold_steps, zero + config.ramp_steps
    return LrState(numerics.settle(scale, xp=xp), limit, broken, rate, rate, hold, ramp)


def may_limit(config: LrConfig) -> bool:
    """Whether the rate can have an absolute limit; static, so an array of ceilings counts."""
    return not (isinstance(config.ceiling, int | float) and config.ceiling <= 0)


def _known(rate: Any, state: LrState, *, xp: Any) -> Any:
    """The schedule's rate, or 1 for a rate that is unknown or of no use."""
    if rate is None:
        return state.scale - state.scale + 1.0
    return xp.where((rate > numerics.TINY) & (rate < _MOST), rate, 1.0)


def _limit(config: LrConfig, broken: Any, peak: Any, *, xp: Any) -> Any:
    """The multiplier at which the schedule's highest rate is the ceiling's share of `broken`."""
    share = numerics.product(config.ceiling, broken, xp=xp)
    top = numerics.quotient(share, peak, xp=xp)
    # Without a cut `share` is 0; so it is where the ceilings of several policies are 0.
    return xp.where(share > 0, xp.minimum(top, 1.0), 1.0)
