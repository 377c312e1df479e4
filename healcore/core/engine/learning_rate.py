"""The learning-rate multiplier: cuts, the hold and the ramp after a cut, and limits of the rate.

A cut of the rate is followed by a hold, and by a ramp back towards the schedule. With
`LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from healcore.core import numerics
from healcore.core.array_namespace import ArrayNamespace, Flag, Float
from healcore.core.engine.config import LrConfig, may_limit_rate
from healcore.core.engine.incidents import RecoveryOrders
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
    xp: ArrayNamespace,
) -> LrState:
    """Updates the multiplier by one step; only healthy steps count for hold and ramp.

    A cut multiplies the multiplier in force. In an open incident the multiplier stays, except that
    the ceiling lowers it if the schedule rises. If no rule cuts, the host alone limits the rate. A
    refund, after long health, raises the limit. `rate` is the schedule's learning rate at this
    step, or None if it is unknown, which counts as a constant rate of 1. At a rate of 0 no
    multiplier is wrong: it stays.
    """
    if orders.cut is None and not may_limit_rate(config):
        return state
    stored_rate = _stored_rate(rate, state, xp=xp)
    known_rate = xp.abs(stored_rate)  # 1 for `UNKNOWN_RATE`
    has_rate = known_rate > 0
    continues = _continues_schedule(state, known_rate, has_rate, xp=xp)
    raised = xp.quotient(state.rate_at_cut, config.factor)
    rate_at_cut = xp.minimum(xp.where(orders.refund, raised, state.rate_at_cut), _MAX_RATE)
    state = state._replace(rate_at_cut=rate_at_cut)
    if orders.cut is not None:
        new = _cut_hold_ramp(
            config,
            state,
            orders.cut,
            orders.healthy,
            is_open,
            known_rate,
            has_rate,
            continues,
            xp=xp,
        )
        return new._replace(rate=stored_rate)
    peak = xp.where(continues, xp.maximum(state.peak, known_rate), known_rate)
    scale = numerics.flush(_top_multiplier(config, rate_at_cut, peak, xp=xp), xp=xp)
    scale = xp.where(has_rate, scale, state.scale)
    return state._replace(scale=scale, peak=peak, rate=stored_rate)


def _continues_schedule(state: LrState, rate: Float, has_rate: Flag, *, xp: ArrayNamespace) -> Flag:
    """Whether the rate continues the schedule of the last step. A rate of 0 always does.

    A sudden fall of the rate begins another schedule with a new peak, and so does the first rate
    after a rate of 0.
    """
    before = xp.abs(state.rate)  # 1 for `UNKNOWN_RATE`
    continues = (before > 0) & (rate >= RESTART_RATIO * before)
    return has_rate <= continues  # ~has_rate | continues, in one operation


def _cut_hold_ramp(
    config: LrConfig,
    state: LrState,
    cut: Flag,
    healthy: Flag,
    is_open: Flag,
    rate: Float,
    has_rate: Flag,
    continues_schedule: Flag,
    *,
    xp: ArrayNamespace,
) -> LrState:
    """`update_rate` for a policy that cuts the rate. `LrState.rate` stays for the caller to set.

    multiplier
    1 or the ceiling  ------.                   .------
                            |                 /
                            |              /
    after the cut           '-------------
                           cut     hold     ramp        healthy steps
    """
    # At a rate of 0 a cut is computed as if the rate were 1.
    divisor = xp.where(has_rate, rate, 1.0)
    advances = healthy & ~cut
    cut_scale = xp.maximum(config.factor * state.scale, config.floor)
    # A floor above the multiplier does not raise the multiplier.
    cut_scale = xp.minimum(cut_scale, state.scale)
    after_cut = xp.product(cut_scale, divisor)
    rate_after_cut = xp.where(cut, after_cut, state.rate_after_cut)
    rate_at_cut = xp.where(cut, xp.product(state.scale, divisor), state.rate_at_cut)
    hold = xp.where(cut, config.hold_steps, state.hold)
    ramp = xp.where(cut, config.ramp_steps, state.ramp)
    peak = xp.where(continues_schedule & ~cut, xp.maximum(state.peak, rate), rate)

    holding = hold > 0
    ramp = numerics.decremented(ramp + (holding | ~advances), xp=xp)
    hold = xp.where(advances & holding, hold - 1, hold)
    top = 1.0
    if may_limit_rate(config):
        top = _top_multiplier(config, rate_at_cut, peak, xp=xp)
    bottom = xp.minimum(xp.quotient(rate_after_cut, divisor), top)
    # A division by ramp_steps is not exact in XLA if it is a constant (numerics). 1 / n rounds to
    # the same float32 from Python's double and from an array.
    part = 1.0 / (config.ramp_steps + (config.ramp_steps == 0))
    ramp_share = numerics.as_float(config.ramp_steps - ramp, xp=xp) * part
    ramped = bottom + xp.product(top - bottom, ramp_share)
    scale = xp.where(holding, bottom, xp.where(ramp == 0, top, ramped))
    scale = xp.where(is_open, xp.minimum(state.scale, top), scale)
    scale = xp.where(has_rate, scale, state.scale)
    scale = numerics.flush(xp.where(cut, cut_scale, scale), xp=xp)
    return LrState(scale, rate_after_cut, rate_at_cut, peak, state.rate, hold, ramp)


def limited_rate(
    config: LrConfig, state: LrState, limit: Float, rate: Float | None, *, xp: ArrayNamespace
) -> LrState:
    """The multiplier after the host has limited the rate to `limit`, as after a cut to this rate.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier before.
        limit: upper limit of the learning rate, see `Engine.limit_lr`.
        rate: the schedule's learning rate, or None if it is unknown, which counts as a constant
            rate of 1.
        xp: the array namespace.
    """
    one = numerics.one_like(state.scale)
    stored_rate = _stored_rate(rate, state, xp=xp)
    known_rate = xp.abs(stored_rate)  # 1 for `UNKNOWN_RATE`
    has_rate = known_rate > 0
    divisor = xp.where(has_rate, known_rate, 1.0)
    limit = xp.where(limit > 0, limit, divisor)
    scale = xp.minimum(xp.quotient(limit, divisor), state.scale)
    scale = xp.where(has_rate, scale, state.scale)
    share = xp.where(config.ceiling * one > 0, config.ceiling * one, 1.0)
    rate_at_cut = xp.minimum(xp.quotient(limit, share), _MAX_RATE)
    zero = numerics.zero_like(state.hold)
    return LrState(
        scale=numerics.flush(scale, xp=xp),
        rate_after_cut=limit,
        rate_at_cut=rate_at_cut,
        peak=known_rate,
        rate=stored_rate,
        hold=zero + config.hold_steps,
        ramp=zero + config.ramp_steps,
    )


def _stored_rate(rate: Float | None, state: LrState, *, xp: ArrayNamespace) -> Float:
    """The schedule's rate as a state has it: 0 for the smallest rates, or `UNKNOWN_RATE`.

    A rate that is NaN, negative or 1e12 and more is of no use, so it counts as unknown: a float32
    multiplier cannot bring such a rate back to a usual one exactly. Rounding makes the last rates
    of a schedule that ends with 0 a little larger or smaller than 0.
    """
    if rate is None:
        return numerics.zero_like(state.scale) + UNKNOWN_RATE
    usable = (rate >= -numerics.TINY) & (rate < _MAX_RATE)
    return xp.where(usable, xp.where(rate > numerics.TINY, rate, 0.0), UNKNOWN_RATE)


def _top_multiplier(
    config: LrConfig, rate_at_cut: Float, peak: Float, *, xp: ArrayNamespace
) -> Float:
    """The multiplier at which the schedule's peak is the ceiling's share of `rate_at_cut`."""
    share = xp.product(config.ceiling, rate_at_cut)
    # The peak is 0 until the first rate above 0, where the multiplier stays.
    top = xp.quotient(share, xp.where(peak > 0, peak, 1.0))
    # `share` is 0 before the first cut, and for a policy whose ceiling is 0.
    return xp.where(share > 0, xp.minimum(top, 1.0), 1.0)
