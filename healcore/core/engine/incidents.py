"""Incidents, the recovery that they order, and its budget.

An incident is alarms with one onset. It uses one recovery, however long it lasts. Recovery
escalates (a deeper rollback, another cut) in two cases: alarms continue for `patience` steps after
an order, or another incident begins in the same region.

A skipped non-finite step has changed nothing. Unless it orders a rollback or a cut, it neither
begins nor prolongs an incident in which the model may get worse.

An example with `quiet_steps = 3` and `patience = 4`, whose rule rolls back (R):

    step           1    2    3    4    5    6    7    8    9   10   11   12
    alarm          .    x    x    .    x    x    x    x    .    .    .    .
    order          .    R    .    .    .    .    .    R    .    .    .    .
    alarms since R -    0    1    1    2    3    4    0    0    0    0    0
    quiet          0    0    0    1    0    0    0    0    1    2    3    0
    open           no   yes  yes  yes  yes  yes  yes  yes  yes  yes  no   no

The first alarm orders a rollback at once. The next four alarms order nothing. The alarm after them
orders again, because the first rollback has not helped. Three steps without an alarm end the
incident.

When the recoveries are exhausted, a non-finite step stops the run. Otherwise the run continues,
clipped, with an alert. If the loss still grows at a small fraction of the learning rate after
several rollbacks, it more likely grows by design than because of the updates.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.core import numerics
from healcore.core.array_namespace import ArrayNamespace, Flag, Int, Number
from healcore.core.decision import NONFINITE, Action
from healcore.core.engine.config import EngineConfig, RuleConfig, may_limit_rate
from healcore.core.engine.state import BudgetState, EngineState, IncidentState

_NONFINITE = int(NONFINITE)
_RECOVERS = int(Action.ROLLBACK | Action.CUT_LR)


class RuleOrders(NamedTuple):
    """What the rules that fire at one step ask for.

    Several rules may fire at once. This class joins what they ask for, before the budget decides
    what is ordered (`RecoveryOrders`).
    """

    rollback: Flag
    """Whether to roll back."""
    cut: Flag | None = None
    """Whether to cut the learning rate, or None if no rule of the policy cuts."""
    depth: Int | Number = 1
    """Known-good checkpoint to restore, 1 = newest."""


class RecoveryOrders(NamedTuple):
    """What the engine orders at one step: what the rules ask for, as far as the budget is left.

    A field is None if no rule of the policy can give this order. Which fields are None is therefore
    the same at each step of a run, and a compiled step has no operations for orders that cannot be
    given.
    """

    healthy: Flag | None = None
    """Whether the step has no alarm, and no incident is open in which the model may get worse."""
    refund: Flag | None = None
    """Whether to refund one rollback and one cut."""
    cut: Flag | None = None
    """Whether to cut the learning rate."""
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
    """Whether each incident consists of skipped non-finite steps only.

    A rule of the policy skips every such step, and no rule does more. Then no step of an incident
    changes the model, and there is nothing to order.
    """
    if _may_recover(config) or incident_causes(config) != _NONFINITE:
        return False
    return any(_skips_every_nonfinite_step(rule) for rule in config.rules)


def _skips_every_nonfinite_step(rule: RuleConfig) -> bool:
    """Whether a rule skips each step with NaN or Inf at once, in the loss and in the gradient."""
    if not rule.skip or rule.causes & _NONFINITE != _NONFINITE or rule.within:
        return False
    return isinstance(rule.consecutive, int) and rule.consecutive == 1


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
        skip: the rules skip the step. A step that the host freezes is not meant.
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
    kind = _alarm_of(config, state, incident_cause, alarm, skip, wants, xp=xp)
    none_open = ~state.open
    opens_serious = kind.serious & none_open
    opens_skips = kind.harmless & none_open & ~state.only_skips
    opens_new_serious = opens_serious
    if kind.becomes_serious is not None:
        opens_new_serious = opens_serious & ~kind.becomes_serious
    counts_as_new = xp.shared(opens_new_serious | opens_skips)
    quiet = (state.quiet + 1) * (state.open | state.only_skips)
    quiet = xp.where(alarm, state.quiet * (kind.harmless & state.open), quiet)
    lasts = quiet < config.incident.quiet_steps
    is_open = xp.shared((state.open | opens_serious) & lasts)
    new = state._replace(
        open=is_open,
        only_skips=((kind.stays_skips & ~opens_serious) | opens_skips) & lasts,
        number=state.number + counts_as_new,
        onset=xp.where(counts_as_new, before.step, state.onset),
        quiet=quiet,
    )
    if not _may_recover(config):
        return (new, *_refund_limits(config, budget, is_open | alarm, is_open, xp=xp))
    healthy = xp.shared(~(is_open | alarm))
    new, due = _due_orders(config, new, wants, counts_as_new, alarm, xp=xp)
    return (new, *_grant(config, budget, due, cause, is_open, healthy, xp=xp))


class _Alarm(NamedTuple):
    """What a step means for the incidents: with an alarm it is either harmless or serious."""

    harmless: Flag
    """Whether the step has changed nothing, so that the model cannot have got worse."""
    serious: Flag
    """Whether the model may get worse."""
    stays_skips: Flag
    """Whether an incident of skips is open which no order of this step makes serious."""
    becomes_serious: Flag | None = None
    """Whether an order of this step makes an open incident of skips serious. It is then no new
    incident. None if no rule of the policy recovers."""


def _alarm_of(
    config: EngineConfig,
    state: IncidentState,
    incident_cause: Int,
    alarm: Flag,
    skip: Flag,
    wants: RuleOrders,
    *,
    xp: ArrayNamespace,
) -> _Alarm:
    """Finds out whether the alarm of a step is harmless or serious.

        the step with an alarm                                 harmless    serious
        is skipped, only because it is not finite              yes         no
        is skipped for this reason, and a rule orders a        no          yes
        rollback or a cut
        any other                                              no          yes

    Args:
        config: the policy.
        state: the incidents before the step.
        incident_cause: the `Cause` flags of the step that open an incident.
        alarm: the step has such a cause.
        skip: the rules skip the step.
        wants: the orders of the rules that fire.
        xp: the array namespace.
    """
    harmless = alarm & skip
    if incident_causes(config) & ~_NONFINITE:
        harmless = harmless & ((incident_cause & ~_NONFINITE) == 0)
    serious = alarm & ~harmless
    if not _may_recover(config):
        return _Alarm(harmless, serious, state.only_skips)
    ordered = wants.rollback
    if wants.cut is not None:
        ordered = ordered | wants.cut
    orders_recovery = xp.shared(harmless & ordered)
    harmless = xp.shared(harmless & ~orders_recovery)
    stays_skips = state.only_skips & ~orders_recovery
    serious = serious | orders_recovery
    becomes_serious = state.only_skips & orders_recovery
    return _Alarm(harmless, serious, stays_skips, becomes_serious)


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
    is_new = numerics.and_not(skip, state.only_skips)
    quiet = xp.where(skip, -config.incident.quiet_steps, state.quiet + state.only_skips)
    new = state._replace(
        only_skips=quiet < 0,
        number=state.number + is_new,
        onset=xp.where(is_new, before.step, state.onset),
        quiet=quiet,
    )
    return (new, *_refund_limits(config, before.budget, skip, None, xp=xp))


def _due_orders(
    config: EngineConfig,
    new: IncidentState,
    wants: RuleOrders,
    is_new: Flag,
    alarm: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[IncidentState, RuleOrders]:
    """Finds out which of the wanted orders are due.

    An order is due at the onset of an incident, and again after `patience` alarms in it. Returns
    the incident with new counts, and the due orders with the depth of the rollback.
    """
    patience = config.incident.patience
    since_rollback = xp.where(is_new, -1, new.alarms_since_rollback)
    recover_due = (since_rollback < 0) | (since_rollback >= patience)
    since_cut = new.alarms_since_cut
    cut_due = None
    if wants.cut is not None:
        since_cut = xp.where(is_new, -1, since_cut)
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
