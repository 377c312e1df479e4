"""The learning-rate multiplier: cuts, the hold and the ramp after a cut, and limits of the rate.

A cut of the rate is followed by a hold, and by a ramp back towards the schedule. With
`LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from healcore.core.array_namespace import (
    TINY,
    Flag,
    Float,
    xp,
    zero_like,
)
from healcore.core.engine.config import LrConfig, may_limit_rate
from healcore.core.engine.incident import RecoveryOrders
from healcore.core.engine.state import UNKNOWN_RATE, LrState

_MAX_RATE = 1e12
"""Limit of `LrState.rate_at_cut`, above the rate of any schedule."""
RESTART_RATIO = 0.5
"""A rate below this share of the last step's rate begins another schedule."""


def update_rate(
    config: LrConfig,
    before: LrState,
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

    A cut multiplies the multiplier in force. A refund, after long health, raises the limit.

    Args:
        config: the policy's table `[lr]`.
        before: the multiplier before the step.
        orders: the cut, the refund and the health of the step.
        is_open: an incident is open in which the model may get worse.
        rate: the schedule's learning rate at this step, or None if it is unknown, which counts as a
            constant rate of 1.
        cuts: whether a rule of the policy cuts the rate. Static. Without one, the host alone limits
            the rate.
    """
    if not (cuts or may_limit_rate(config)):
        return before
    cut = orders.cut
    state = _at_rate(before, rate, cut)
    raised = xp.quotient(state.rate_at_cut, zero_like(state.rate_at_cut) + config.factor)
    rate_at_cut = xp.minimum(xp.where(orders.refund, raised, state.rate_at_cut), _MAX_RATE)
    state = state._replace(rate_at_cut=rate_at_cut)
    if not cuts:
        return state._replace(scale=xp.flush(_multiplier(config, state, is_open, cuts=False)))

    # A floor above the multiplier does not raise the multiplier.
    cut_scale = xp.maximum(config.factor * state.scale, config.floor)
    cut_scale = xp.minimum(cut_scale, state.scale)
    divisor = _divisor(state)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)
    holding, advances = hold > 0, orders.healthy & ~cut
    state = state._replace(
        rate_at_cut=xp.where(cut, xp.product(state.scale, divisor), rate_at_cut),
        rate_after_cut=xp.where(cut, xp.product(cut_scale, divisor), state.rate_after_cut),
        hold=hold,
        ramp=xp.decremented(ramp + (holding | ~advances)),
    )
    scale = _multiplier(config, state, is_open, cuts=True)
    return state._replace(
        scale=xp.flush(xp.where(cut, cut_scale, scale)),
        hold=xp.where(advances & holding, hold - 1, hold),
    )


def limited_rate(
    config: LrConfig, state: LrState, limit: Float, rate: Float | None, *, cuts: bool
) -> LrState:
    """The multiplier after the host has limited the rate, as after a cut to this rate.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier before.
        limit: upper limit of the learning rate, see `Engine.limit_lr`.
        rate: the schedule's learning rate, or None if it is unknown, which counts as a constant
            rate of 1.
        cuts: whether a rule of the policy cuts the rate. Otherwise the limit is in force at once,
            without a hold and a ramp.
    """
    yes = state.hold >= 0
    state = _at_rate(state, rate, yes)
    limit = xp.where(limit > 0, limit, _divisor(state))
    share = zero_like(limit) + config.ceiling
    state = state._replace(
        rate_after_cut=limit,
        rate_at_cut=xp.minimum(xp.quotient(limit, xp.where(share > 0, share, 1.0)), _MAX_RATE),
    )
    if cuts:
        hold, ramp = (xp.where(yes, n, state.hold) for n in (config.hold_steps, config.ramp_steps))
        state = state._replace(hold=hold, ramp=ramp)
    return state._replace(scale=xp.flush(_multiplier(config, state, ~yes, cuts=cuts)))


def rescaled(config: LrConfig, state: LrState, rate: Float, *, cuts: bool) -> LrState:
    """The multiplier at another rate of the schedule, at the same place of hold and ramp.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier, without an open incident.
        rate: the schedule's learning rate.
        cuts: whether a rule of the policy cuts the rate. Static.
    """
    no = state.hold < 0
    scale = _multiplier(config, _at_rate(state, rate, no), no, cuts=cuts)
    return state._replace(scale=xp.flush(scale))


def _at_rate(state: LrState, rate: Float | None, cut: Flag) -> LrState:
    """The state with the schedule's rate and its highest rate since the last cut.

    A rate that is NaN, negative or 1e12 and more is of no use, so it counts as unknown: a float32
    multiplier cannot bring such a rate back to a usual one exactly. Rounding makes the last rates
    of a schedule that ends with 0 a little larger or smaller than 0.
    """
    stored = zero_like(state.scale) + UNKNOWN_RATE
    if rate is not None:
        usable = (rate >= -TINY) & (rate < _MAX_RATE)
        stored = xp.where(usable, xp.where(rate > TINY, rate, 0.0), UNKNOWN_RATE)
    # A sudden fall of the rate begins another schedule with a new peak, and so does the first rate
    # after a rate of 0. A rate of 0 always continues the schedule.
    known, before = abs(stored), abs(state.rate)  # 1 for `UNKNOWN_RATE`
    continues = (known == 0) | ((before > 0) & (known >= RESTART_RATIO * before))
    peak = xp.where(continues & ~cut, xp.maximum(state.peak, known), known)
    return state._replace(peak=peak, rate=stored)


def _divisor(state: LrState) -> Float:
    """The schedule's rate; 1 if the rate is unknown, or 0."""
    known = abs(state.rate)
    return xp.where(known > 0, known, 1.0)


def _multiplier(config: LrConfig, state: LrState, is_open: Flag, *, cuts: bool) -> Float:
    """The multiplier at the state's place of hold and ramp.

    At a rate of 0 no multiplier is wrong: it stays. In an open incident the multiplier stays,
    except that the ceiling lowers it if the schedule rises.
    """
    # The multiplier at which the schedule's peak is the ceiling's share of `rate_at_cut`. The peak
    # is 0 until the first rate above 0, where the multiplier stays. The share is 0 before the first
    # cut, and for a policy whose ceiling is 0.
    share = xp.product(config.ceiling, state.rate_at_cut)
    top = xp.quotient(share, xp.where(state.peak > 0, state.peak, 1.0))
    top = scale = xp.where(share > 0, xp.minimum(top, 1.0), 1.0)
    if cuts:
        bottom = xp.minimum(xp.quotient(state.rate_after_cut, _divisor(state)), top)
        # A division by ramp_steps is not exact in XLA if it is a constant (`array_namespace`).
        # 1 / n rounds to the same float32 from Python's double and from an array.
        part = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
        ramped = xp.as_float(config.ramp_steps - state.ramp) * part
        ramped = bottom + xp.product(top - bottom, ramped)
        # While the multiplier is held, the ramp is at its begin, `bottom`.
        scale = xp.where(state.hold + state.ramp == 0, top, ramped)
        scale = xp.where(is_open, xp.minimum(state.scale, top), scale)
    return xp.where(state.rate == 0, state.scale, scale)
