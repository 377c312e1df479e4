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

from healcore.core.array_namespace import Flag, Int, xp
from healcore.core.decision import NONFINITE, Action
from healcore.core.engine.config import EngineConfig, may_limit_rate
from healcore.core.engine.state import BudgetState, EngineState, IncidentState

_NONFINITE = int(NONFINITE)
_RECOVERS = int(Action.ROLLBACK | Action.CUT_LR)


class RecoveryOrders(NamedTuple):
    """What the engine orders at one step: what the rules ask for, as far as the budget is left."""

    healthy: Flag
    """Whether the step has no alarm, and no incident is open in which the model may get worse."""
    refund: Flag
    """Whether to refund one rollback and one cut."""
    cut: Flag
    """Whether to cut the learning rate."""
    depth: Int
    """Known-good checkpoint to restore, 1 = newest; 0 without a rollback."""
    action: Int
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
        if rule.skip or rule.action & (_RECOVERS | Action.STOP):
            mask |= rule.causes
    return mask


def recovers(config: EngineConfig) -> bool:
    """Whether a rule of the policy rolls back or cuts the rate."""
    return any(rule.action & _RECOVERS for rule in config.rules)


def update_incident(
    config: EngineConfig,
    before: EngineState,
    cause: Int,
    skip: Flag,
    wants_rollback: Flag,
    wants_cut: Flag,
) -> tuple[IncidentState, BudgetState, RecoveryOrders]:
    """Updates incidents and budget by one step, and grants the orders that the rules want.

    Args:
        config: the policy.
        before: the state before the step.
        cause: the `Cause` flags of the step.
        skip: the rules skip the step. A step that the host freezes is not meant.
        wants_rollback: a rule that fires rolls back.
        wants_cut: a rule that fires cuts the learning rate.

    Returns:
        The new incidents, the new budget, and the orders for which the budget is left.
    """
    state = before.incident
    incident_cause = cause & incident_causes(config)
    alarm = incident_cause != 0
    # An alarm is harmless if its step is skipped only because it is not finite, and nothing more is
    # ordered: the step has changed nothing. Any other alarm is serious.
    harmless = alarm & skip & ((incident_cause & ~_NONFINITE) == 0)
    worsens = state.only_skips
    if recovers(config):
        acts = xp.shared(harmless & (wants_rollback | wants_cut))
        harmless = harmless & ~acts
        # An order makes an open incident of skips serious. It is then no new incident.
        worsens = worsens & ~acts
    serious = xp.shared(alarm & ~harmless)
    in_incident: Flag = state.open | state.only_skips
    is_new = xp.shared((alarm & ~in_incident) | (serious & worsens))
    quiet = (state.quiet + 1) * in_incident
    quiet = xp.where(alarm, state.quiet * (harmless & state.open), quiet)
    lasts = quiet < config.incident.quiet_steps
    is_serious: Flag = state.open | serious
    is_open = xp.shared(is_serious & lasts)
    only_skips = (state.only_skips | harmless) & lasts & ~is_serious
    onset = xp.where(is_new, before.step, state.onset)
    healthy = xp.shared(~(is_open | alarm))
    new = state._replace(
        open=is_open,
        only_skips=only_skips,
        number=state.number + is_new,
        onset=onset,
        quiet=quiet,
    )
    budget = before.budget
    rollback = cut = refund = alarm & False
    action = depth = cause & 0

    if recovers(config):
        # An order is due at the onset of an incident, and again after `patience` alarms in it.
        patience = config.incident.patience
        since_rollback = xp.where(is_new, -1, state.alarms_since_rollback)
        since_cut = xp.where(is_new, -1, state.alarms_since_cut)
        cut = xp.shared(wants_cut & ((since_cut < 0) | (since_cut >= patience)))
        # A cut repeats the rollback order, because the host may have declined an earlier one.
        due = (since_rollback < 0) | (since_rollback >= patience) | cut
        rollback = xp.shared(wants_rollback & due)
        # A rollback also resets the step counter, so an earlier onset is in the same region.
        near = (state.last_onset >= 0) & (onset - state.last_onset < config.rollback.region)
        escalations = xp.where(rollback, (state.escalations + 1) * near, state.escalations)
        new = new._replace(
            alarms_since_rollback=xp.where(rollback, 0, _count_alarm(since_rollback, alarm)),
            alarms_since_cut=xp.where(cut, 0, _count_alarm(since_cut, alarm)),
            last_onset=xp.where(rollback, onset, state.last_onset),
            escalations=escalations,
        )
        # `Engine.on_rollback` subtracts a rollback from the budget.
        granted = xp.shared(rollback & (budget.recoveries > 0))
        denied = rollback & ~granted
        nonfinite = (cause & _NONFINITE) != 0
        depth = config.rollback.depth + config.rollback.deepen * escalations
        depth = xp.where(granted, depth, action)
        is_open = is_open | rollback | cut
        cut = xp.shared(cut & (budget.lr_cuts > 0))
        budget = budget._replace(lr_cuts=budget.lr_cuts - xp.as_int(cut))
        action = (
            xp.flag(granted, Action.ROLLBACK)
            | xp.flag(cut, Action.CUT_LR)
            | xp.flag(denied & nonfinite, Action.STOP)
            | xp.flag(denied & ~nonfinite, Action.ALERT)
        )
    if recovers(config) or may_limit_rate(config.lr):  # a limit of the host is taken back, too
        # A step in an incident resets the count of healthy steps; a skipped non-finite step outside
        # of an incident leaves it unchanged.
        count = (budget.healthy_steps + healthy) * ~is_open
        refund = xp.shared(count >= config.budget.refund_after)
        budget = BudgetState(
            recoveries=xp.minimum(budget.recoveries + refund, config.budget.recoveries),
            lr_cuts=xp.minimum(budget.lr_cuts + refund, config.budget.lr_cuts),
            healthy_steps=xp.where(refund, 0, count),
        )
    return new, budget, RecoveryOrders(healthy, refund, cut, depth, action)


def _count_alarm(since: Int, alarm: Flag) -> Int:
    """Counts an alarm since an order; -1 (no order yet) stays."""
    return since + (alarm & (since >= 0))
