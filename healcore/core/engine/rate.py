"""The learning-rate multiplier: cuts, the hold and the ramp after a cut, and limits of the rate.

A cut of the rate is followed by a hold, and by a ramp back towards the schedule. With
`LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from healcore.core import numerics
from healcore.core.array_namespace import Flag, Float, xp
from healcore.core.engine.config import LrConfig, may_limit_rate
from healcore.core.engine.incident import RecoveryOrders
from healcore.core.engine.state import UNKNOWN_RATE, LrState

_MAX_RATE = 1e12
"""Limit of `LrState.rate_at_cut`, above the rate of any schedule."""
RESTART_RATIO = 0.5
"""A rate below this share of the last step's rate begins another schedule."""


def update_rate(
    config: LrConfig,
    state: LrState,
    orders: RecoveryOrders,
    is_open: Flag,
    rate: Float | None,
    *,
    cuts: bool,
) -> LrState:
    """Updates the multiplier by one step; only healthy steps count for hold and ramp.

    multiplier
    1 or the ceiling  ------.                   .------
                            |                 /
                            |              /
    after the cut           '-------------
                           cut     hold     ramp        healthy steps

    A cut multiplies the multiplier in force. In an open incident the multiplier stays, except that
    the ceiling lowers it if the schedule rises. If no rule cuts, the host alone limits the rate. A
    refund, after long health, raises the limit. At a rate of 0 no multiplier is wrong: it stays.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier before the step.
        orders: the cut, the refund and the health of the step.
        is_open: an incident is open in which the model may get worse.
        rate: the schedule's learning rate at this step, or None if it is unknown, which counts as a
            constant rate of 1.
        cuts: whether a rule of the policy cuts the rate. Static.
    """
    if not (cuts or may_limit_rate(config)):
        return state
    cut = orders.cut
    stored_rate = _stored_rate(rate, state)
    known_rate = abs(stored_rate)  # 1 for `UNKNOWN_RATE`
    has_rate = known_rate > 0
    # At a rate of 0 a cut is computed as if the rate were 1.
    divisor = xp.where(has_rate, known_rate, 1.0)
    raised = xp.quotient(state.rate_at_cut, config.factor)
    rate_at_cut = xp.minimum(xp.where(orders.refund, raised, state.rate_at_cut), _MAX_RATE)
    if cuts:
        rate_at_cut = xp.where(cut, xp.product(state.scale, divisor), rate_at_cut)
    # A sudden fall of the rate begins another schedule with a new peak, and so does the first rate
    # after a rate of 0. A rate of 0 always continues the schedule.
    before = abs(state.rate)  # 1 for `UNKNOWN_RATE`
    continues = ~has_rate | ((before > 0) & (known_rate >= RESTART_RATIO * before))
    peak = xp.where(continues & ~cut, xp.maximum(state.peak, known_rate), known_rate)

    # The multiplier at which the schedule's peak is the ceiling's share of `rate_at_cut`. The peak
    # is 0 until the first rate above 0, where the multiplier stays. The share is 0 before the first
    # cut, and for a policy whose ceiling is 0.
    share = xp.product(config.ceiling, rate_at_cut)
    top = xp.quotient(share, xp.where(peak > 0, peak, 1.0))
    top = xp.where(share > 0, xp.minimum(top, 1.0), 1.0)
    if not cuts:  # a limit of the host has no hold and no ramp
        scale = xp.flush(xp.where(has_rate, top, state.scale))
        return state._replace(scale=scale, rate_at_cut=rate_at_cut, peak=peak, rate=stored_rate)

    # A floor above the multiplier does not raise the multiplier.
    cut_scale = xp.maximum(config.factor * state.scale, config.floor)
    cut_scale = xp.minimum(cut_scale, state.scale)
    rate_after_cut = xp.where(cut, xp.product(cut_scale, divisor), state.rate_after_cut)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)
    holding = hold > 0
    advances = orders.healthy & ~cut
    ramp = xp.decremented(ramp + (holding | ~advances))
    hold = xp.where(advances & holding, hold - 1, hold)
    bottom = xp.minimum(xp.quotient(rate_after_cut, divisor), top)
    # A division by ramp_steps is not exact in XLA if it is a constant (numerics). 1 / n rounds to
    # the same float32 from Python's double and from an array.
    part = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
    ramp_share = xp.as_float(config.ramp_steps - ramp) * part
    ramped = bottom + xp.product(top - bottom, ramp_share)
    scale = xp.where(holding, bottom, xp.where(ramp == 0, top, ramped))
    scale = xp.where(is_open, xp.minimum(state.scale, top), scale)
    scale = xp.where(has_rate, scale, state.scale)
    return LrState(
        scale=xp.flush(xp.where(cut, cut_scale, scale)),
        rate_after_cut=rate_after_cut,
        rate_at_cut=rate_at_cut,
        peak=peak,
        rate=stored_rate,
        hold=hold,
        ramp=ramp,
    )


def limited_rate(config: LrConfig, state: LrState, limit: Float, rate: Float | None) -> LrState:
    """The multiplier after the host has limited the rate to `limit`, as after a cut to this rate.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier before.
        limit: upper limit of the learning rate, see `Engine.limit_lr`.
        rate: the schedule's learning rate, or None if it is unknown, which counts as a constant
            rate of 1.
    """
    no, yes = state.scale < 0, state.scale > 0
    none = state.hold & 0
    orders = RecoveryOrders(healthy=no, refund=no, cut=yes, depth=none, action=none)
    cut = update_rate(config, state, orders, no, rate, cuts=True)
    known_rate = abs(cut.rate)  # 1 for `UNKNOWN_RATE`
    divisor = xp.where(known_rate > 0, known_rate, 1.0)
    limit = xp.where(limit > 0, limit, divisor)
    scale = xp.minimum(xp.quotient(limit, divisor), state.scale)
    share = numerics.zero_like(state.scale) + config.ceiling
    share = xp.where(share > 0, share, 1.0)
    return cut._replace(
        scale=xp.flush(xp.where(known_rate > 0, scale, state.scale)),
        rate_after_cut=limit,
        rate_at_cut=xp.minimum(xp.quotient(limit, share), _MAX_RATE),
    )


def _stored_rate(rate: Float | None, state: LrState) -> Float:
    """The schedule's rate as a state has it: 0 for the smallest rates, or `UNKNOWN_RATE`.

    A rate that is NaN, negative or 1e12 and more is of no use, so it counts as unknown: a float32
    multiplier cannot bring such a rate back to a usual one exactly. Rounding makes the last rates
    of a schedule that ends with 0 a little larger or smaller than 0.
    """
    if rate is None:
        return numerics.zero_like(state.scale) + UNKNOWN_RATE
    usable = (rate >= -numerics.TINY) & (rate < _MAX_RATE)
    return xp.where(usable, xp.where(rate > numerics.TINY, rate, 0.0), UNKNOWN_RATE)
