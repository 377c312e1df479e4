"""Incidents, the recovery that they order, its budget, and the learning-rate multiplier.

An incident is a run of alarms with one onset. It uses one recovery, however long it lasts. Recovery
escalates (a deeper rollback, another cut) in two cases: alarms continue for `patience` steps after
an order, or another incident begins in the same region.

A skipped non-finite step has changed nothing. Unless it orders a rollback or a cut, it neither
begins nor prolongs an incident in which the model may get worse.

When the recoveries are exhausted, a non-finite step stops the run. Otherwise the run continues,
clipped, with an alert. If the loss still grows at a small fraction of the learning rate after
several rollbacks, it more likely grows by design than because of the updates.

A cut of the rate is followed by a hold, and by a ramp back towards the schedule. With
`LrConfig.ceiling` above 0 the ramp ends at `ceiling` times the rate that broke the run. If the
schedule's rate is known, this limit is absolute: the schedule keeps its shape, scaled so that its
highest rate since the cut equals the limit. Only long health raises the limit, each time by the
inverse factor of one cut.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.core import numerics
from healcore.core.array_namespace import PRODUCT_LIMIT, ArrayNamespace, Flag, Float, Int, Number
from healcore.core.decision import NONFINITE, Action
from healcore.core.engine.state import (
    BudgetState,
    EngineConfig,
    EngineState,
    IncidentState,
    LrConfig,
    LrState,
)

_NONFINITE = int(NONFINITE)
_RECOVERS = int(Action.ROLLBACK | Action.CUT_LR)


class RuleOrders(NamedTuple):
    """What the rules that fire at one step ask for.

    Several rules may fire at once. Their wishes are joined here, before the budget decides what is
    ordered (`RecoveryOrders`).
    """

    rollback: Flag
    """Roll back."""
    cut: Flag | None = None
    """Cut the learning rate, or None if no rule of the policy cuts."""
    depth: Int | Number = 1
    """Known-good checkpoint to restore, 1 = newest."""


class RecoveryOrders(NamedTuple):
    """What the engine orders at one step: the wishes of the rules for which the budget is left.

    A field is None if no rule of the policy can give this order. Which fields are None is therefore
    the same at each step of a run, and a compiled step has no operations for orders that cannot be
    given.
    """

    healthy: Flag = None
    """The step has no alarm, and no incident is open in which the model may get worse."""
    refund: Flag = None
    """Refund one rollback and one cut."""
    cut: Flag | None = None
    """Cut the learning rate."""
    depth: Int | None = None
    """Known-good checkpoint to restore, 1 = newest; 0 without a rollback."""
    action: Int | None = None
    """`Action` flags."""


def incident_causes(config: EngineConfig) -> int:
    """Finds the causes that open an incident.

    Args:
        config: the policy.

    Returns:
        `Cause` flags: non-finite values, and the causes of the rules that skip, stop or recover. A
        cause that is only reported opens no incident.
    """
    mask = _NONFINITE
    for rule in config.rules:
        if rule.skip or rule.action & (_RECOVERS | int(Action.STOP)):
            mask |= rule.causes
    return mask


def _only_skips(config: EngineConfig) -> bool:
    """Whether incidents are skipped non-finite steps only: one rule skips each, no rule does more.

    Then no step of an incident changes the model, and there is nothing to order.
    """
    skips = any(
        rule.skip
        and rule.causes & _NONFINITE == _NONFINITE
        and isinstance(rule.consecutive, int)
        and rule.consecutive == 1
        and not rule.within
        for rule in config.rules
    )
    return skips and incident_causes(config) == _NONFINITE and not _may_recover(config)


def _may_recover(config: EngineConfig) -> bool:
    """Whether a rule of the policy rolls back or cuts the rate."""
    return any(rule.action & _RECOVERS for rule in config.rules)


def update_incidents(
    config: EngineConfig,
    before: EngineState,
    cause: Int,
    skip: Flag,
    wants: RuleOrders,
    *,
    xp: ArrayNamespace,
) -> tuple[IncidentState, BudgetState, RecoveryOrders]:
    """Updates incidents and budget by one step, and grants the orders that the rules want.

    A policy never changes during a run, so the part that it can need is chosen from the policy, and
    nothing else is computed or changed:

        the policy                                     what is updated
        some rule rolls back or cuts the rate          incidents, orders and their budget
        no such rule                                   incidents, refunds of limits of the rate
        only NaN and Inf are alarms, which one rule    the same, by `_update_skips`
        skips at once

    Args:
        config: the policy.
        before: the state before the step.
        cause: the `Cause` flags of the step.
        skip: the rules skip the step. A step that the host withholds is not meant.
        wants: the orders of the rules that fire.
        xp: the array namespace.

    Returns:
        The new incidents, the new budget, and the orders for which the budget is left.
    """
    if _only_skips(config):
        return _update_skips(config, before, skip, xp=xp)
    state, budget = before.incident, before.budget
    incident_cause = cause & incident_causes(config)
    alarm = incident_cause != 0
    # A step is harmless if it is skipped only because it is not finite. If such steps order a
    # recovery, their incident is an ordinary one.
    harmless = alarm & skip
    if incident_causes(config) & ~_NONFINITE:
        harmless = harmless & ((incident_cause & ~_NONFINITE) == 0)
    serious = alarm & ~harmless
    known_skips = state.only_skips
    turned = None
    if _may_recover(config):
        ordered = wants.rollback
        if wants.cut is not None:
            ordered = ordered | wants.cut
        orders_recovery = xp.shared(harmless & ordered)
        harmless = xp.shared(harmless & ~orders_recovery)
        known_skips = state.only_skips & ~orders_recovery
        # The order turns an incident of skips into an ordinary one, which is not a new one.
        serious = serious | orders_recovery
        turned = state.only_skips & orders_recovery
    is_new = ~state.open
    begun = serious & is_new
    skip_begun = harmless & is_new & ~state.only_skips
    first = begun
    if turned is not None:
        first = begun & ~turned
    opened = xp.shared(first | skip_begun)
    quiet = (state.quiet + 1) * (state.open | state.only_skips)
    quiet = xp.where(alarm, state.quiet * (harmless & state.open), quiet)
    lasts = quiet < config.incident.quiet_steps
    is_open = xp.shared((state.open | begun) & lasts)
    new = state._replace(
        open=is_open,
        only_skips=((known_skips & ~begun) | skip_begun) & lasts,
        number=state.number + opened,
        onset=xp.where(opened, before.step, state.onset),
        quiet=quiet,
    )
    if not _may_recover(config):
        return (new, *_refund_limits(config, budget, is_open | alarm, is_open, xp=xp))
    healthy = xp.shared(~(is_open | alarm))
    new, due = _due_orders(config, new, wants, opened, alarm, xp=xp)
    return (new, *_grant(config, budget, due, cause, is_open, healthy, xp=xp))


def _update_skips(
    config: EngineConfig, before: EngineState, skip: Flag, *, xp: ArrayNamespace
) -> tuple[IncidentState, BudgetState, RecoveryOrders]:
    """`update_incidents` for a policy of `_only_skips`: every skip belongs to an incident.

    It gives the same incidents by fewer operations. `default` is such a policy, and its engine has
    201 equations in JAX with this form and 232 without it. No incident is ever `open`, because no
    step of it changes the model, so `only_skips` alone says whether there is one. `quiet` counts
    from ``-quiet_steps`` to 0, where the incident ends:

        step          ok   NaN   ok   ok  ...   ok      (quiet_steps = 20)
        quiet          0   -20  -19  -18  ...    0
        only_skips    no   yes  yes  yes  ...   no
    """
    state = before.incident
    opened = numerics.and_not(skip, state.only_skips)
    quiet = xp.where(skip, -config.incident.quiet_steps, state.quiet + state.only_skips)
    new = state._replace(
        only_skips=quiet < 0,
        number=state.number + opened,
        onset=xp.where(opened, before.step, state.onset),
        quiet=quiet,
    )
    return (new, *_refund_limits(config, before.budget, skip, None, xp=xp))


def _due_orders(
    config: EngineConfig,
    new: IncidentState,
    wants: RuleOrders,
    opened: Flag,
    alarm: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[IncidentState, RuleOrders]:
    """Finds out which of the wanted orders are due.

    An order is due at the onset of an incident, and again after `patience` alarms in it. Returns
    the incident with new counts, and the due orders with the depth of the rollback.
    """
    patience = config.incident.patience
    since_rollback = xp.where(opened, -1, new.alarms_since_rollback)
    recover_due = (since_rollback < 0) | (since_rollback >= patience)
    since_cut = new.alarms_since_cut
    cut_due = None
    if wants.cut is not None:
        since_cut = xp.where(opened, -1, since_cut)
        cut_due = xp.shared(wants.cut & ((since_cut < 0) | (since_cut >= patience)))
        since_cut = xp.where(cut_due, 0, _count_alarm(since_cut, alarm))
        # A cut repeats the rollback order, because the host may have declined an earlier one.
        recover_due = recover_due | cut_due
    recover = xp.shared(wants.rollback & recover_due)
    since_rollback = xp.where(recover, 0, _count_alarm(since_rollback, alarm))
    new = new._replace(alarms_since_rollback=since_rollback, alarms_since_cut=since_cut)

    depth = config.rollback.depth
    if not (isinstance(config.rollback.deepen, int) and config.rollback.deepen == 0):
        near = new.onset - new.last_onset < config.rollback.region
        # A rollback also resets the step counter, so an earlier onset is in the same region.
        again = (new.last_onset >= 0) & near
        escalations = xp.where(recover, (new.escalations + 1) * again, new.escalations)
        last_onset = xp.where(recover, new.onset, new.last_onset)
        new = new._replace(escalations=escalations, last_onset=last_onset)
        depth = depth + config.rollback.deepen * escalations
    return new, RuleOrders(recover, cut_due, depth)


def _grant(
    config: EngineConfig,
    budget: BudgetState,
    due: RuleOrders,
    cause: Int,
    is_open: Flag,
    healthy: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[BudgetState, RecoveryOrders]:
    """Grants the due orders for which the budget is left.

    A step in an incident resets the count of healthy steps; a skipped non-finite step outside an
    incident leaves the count unchanged. `Engine.on_rollback` subtracts a rollback.
    """
    left = budget.recoveries > 0
    granted = xp.shared(due.rollback & left)
    denied = due.rollback & ~left
    nonfinite = (cause & _NONFINITE) != 0
    action = (
        xp.flag(granted, Action.ROLLBACK)
        | xp.flag(denied & nonfinite, Action.STOP)
        | xp.flag(denied & ~nonfinite, Action.ALERT)
    )
    ends_health = is_open | due.rollback
    lr_cuts = budget.lr_cuts
    cut_granted = None
    if due.cut is not None:
        ends_health = ends_health | due.cut
        cut_granted = xp.shared(due.cut & (lr_cuts > 0))
        lr_cuts = xp.where(cut_granted, lr_cuts - 1, lr_cuts)
        action = action | xp.flag(cut_granted, Action.CUT_LR)
    count = (budget.healthy_steps + healthy) * ~ends_health
    refund = xp.shared(count >= config.budget.refund_after)
    new_budget = BudgetState(
        recoveries=xp.minimum(budget.recoveries + refund, config.budget.recoveries),
        lr_cuts=xp.minimum(lr_cuts + refund, config.budget.lr_cuts),
        healthy_steps=xp.where(refund, 0, count),
    )
    depth = xp.where(granted, due.depth, numerics.zero_like(budget.healthy_steps))
    return new_budget, RecoveryOrders(healthy, refund, cut_granted, depth, action)


def _refund_limits(
    config: EngineConfig,
    budget: BudgetState,
    unhealthy: Flag,
    in_incident: Flag | None,
    *,
    xp: ArrayNamespace,
) -> tuple[BudgetState, RecoveryOrders]:
    """The budget of a policy without recovery: long health gives back limits of the rate.

    Args:
        config: the policy.
        budget: the budget before the step.
        unhealthy: the step does not count as healthy.
        in_incident: the step resets the count of healthy steps, or None if no incident is ever
            open in which the model may get worse.
        xp: the array namespace.
    """
    if not may_limit_rate(config.lr):
        return budget, RecoveryOrders()
    count = budget.healthy_steps + ~unhealthy
    if in_incident is not None:
        count = count * ~in_incident
    refund = count >= config.budget.refund_after
    lr_cuts = xp.minimum(budget.lr_cuts + refund, config.budget.lr_cuts)
    refunded = budget._replace(lr_cuts=lr_cuts, healthy_steps=xp.where(refund, 0, count))
    return refunded, RecoveryOrders(refund=refund)


def _count_alarm(since: Int, alarm: Flag) -> Int:
    """Counts an alarm since an order; -1 (no order yet) stays."""
    return since + (alarm & (since >= 0))


# -- the learning-rate multiplier ------------------------------------------------------------------

_MAX_RATE = 1e12  # limit of `LrState.rate_at_cut`, above the rate of any schedule
RESTART_RATIO = 0.5  # a rate below this share of the last step's rate begins another schedule


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
    step, or None for a constant rate of 1. At a rate of 0 no multiplier is wrong: it stays.
    """
    if orders.cut is None and not may_limit_rate(config):
        return state
    known_rate = _known_rate(rate, state, xp=xp)
    raised = xp.quotient(state.rate_at_cut, config.factor)
    rate_at_cut = xp.minimum(xp.where(orders.refund, raised, state.rate_at_cut), _MAX_RATE)
    state = state._replace(rate_at_cut=rate_at_cut)
    if orders.cut is not None:
        return _cut_hold_ramp(config, state, orders.cut, orders.healthy, is_open, known_rate, xp=xp)
    peak = xp.where(_keeps_peak(state, known_rate), state.peak, known_rate)
    scale = numerics.flush(_top_multiplier(config, rate_at_cut, peak, xp=xp), xp=xp)
    scale = xp.where(known_rate > 0, scale, state.scale)
    return state._replace(scale=scale, peak=peak, rate=known_rate)


def _keeps_peak(state: LrState, rate: Float) -> Flag:
    """Whether the peak stays, as at a rate of 0.

    A sudden fall of the rate begins another schedule with a new peak, and so does the first rate
    after a rate of 0.
    """
    same_schedule = (state.rate > 0) & (rate >= RESTART_RATIO * state.rate)
    return (rate <= 0) | (same_schedule & (state.peak > rate))


def _cut_hold_ramp(
    config: LrConfig,
    state: LrState,
    cut: Flag,
    healthy: Flag,
    is_open: Flag,
    rate: Float,
    *,
    xp: ArrayNamespace,
) -> LrState:
    """`update_rate` for a policy that cuts the rate, with a known rate.

    multiplier
    1 or the ceiling  ------.                   .------
                            |                 /
                            |              /
    after the cut           '-------------
                           cut     hold     ramp        healthy steps
    """
    keeps_peak = _keeps_peak(state, rate)
    has_rate = rate > 0
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
    peak = xp.where(keeps_peak & ~cut, state.peak, rate)

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
    return LrState(scale, rate_after_cut, rate_at_cut, peak, rate, hold, ramp)


def limited_rate(
    config: LrConfig, state: LrState, limit: Float, rate: Float | None, *, xp: ArrayNamespace
) -> LrState:
    """The multiplier after the host has limited the rate to `limit`, as after a cut to this rate.

    Args:
        config: the policy's table `[lr]`.
        state: the multiplier before.
        limit: upper limit of the learning rate, see `Engine.limit_lr`.
        rate: the schedule's learning rate, or None for a constant rate of 1.
        xp: the array namespace.
    """
    one = _known_rate(None, state, xp=xp)
    known_rate = _known_rate(rate, state, xp=xp)
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
        rate=known_rate,
        hold=zero + config.hold_steps,
        ramp=zero + config.ramp_steps,
    )


def may_limit_rate(config: LrConfig) -> bool:
    """Whether the rate can have an absolute limit; static, so an array of ceilings counts."""
    return not (isinstance(config.ceiling, int | float) and config.ceiling <= 0)


def _known_rate(rate: Float | None, state: LrState, *, xp: ArrayNamespace) -> Float:
    """The schedule's rate, 0 for the smallest rates, or 1 for a rate that is unknown or of no use.

    Every finite rate counts: a limit must hold at the rate of a broken schedule too.

    Rounding makes the last rates of a schedule that ends with 0 a little larger or smaller than 0.
    """
    if rate is None:
        return numerics.zero_like(state.scale) + 1.0
    usable = (rate >= -numerics.TINY) & (rate <= numerics.FLOAT32_MAX)
    # A multiplier for a rate above the limit of products is flushed to 0.
    known = xp.minimum(xp.where(usable, rate, 1.0), PRODUCT_LIMIT)
    return xp.where(known > numerics.TINY, known, 0.0)


def _top_multiplier(
    config: LrConfig, rate_at_cut: Float, peak: Float, *, xp: ArrayNamespace
) -> Float:
    """The multiplier at which the schedule's peak is the ceiling's share of `rate_at_cut`."""
    share = xp.product(config.ceiling, rate_at_cut)
    # The peak is 0 until the first rate above 0, where the multiplier stays.
    top = xp.quotient(share, xp.where(peak > 0, peak, 1.0))
    # Without a cut `share` is 0; so it is where the ceilings of several policies are 0.
    return xp.where(share > 0, xp.minimum(top, 1.0), 1.0)
