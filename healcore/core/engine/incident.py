"""Incidents: runs of alarms with one onset, the escalation within them, and the budget.

An incident uses one recovery, however long it lasts. Recovery escalates (a deeper rollback, another
cut) in two cases: alarms continue for `patience` steps after an order, or another incident begins
in the same region.

A skipped non-finite step has changed nothing. Unless it orders a rollback or a cut, it neither
begins nor prolongs an incident in which the model may get worse.

When the recoveries are exhausted, a non-finite step stops the run. Otherwise the run continues,
clipped, with an alert. If the loss still grows at a small fraction of the learning rate after
several rollbacks, it more likely grows by design than because of the updates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import BudgetConfig, EngineConfig
from healcore.core.verdict import NONFINITE, Action

ACTS = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP)
"""Actions that change the run."""

_NONFINITE = int(NONFINITE)


class IncidentState(NamedTuple):
    """The open incident, and the last recovery."""

    open: Any  # bool: an incident is open in which a step may have changed the model
    skipped: Any  # bool: an incident is open that has only skipped non-finite steps
    number: Any  # int32: incidents so far, including the open one
    onset: Any  # int32: step of its first alarm
    quiet: Any  # int32: steps since its last alarm
    recovered: Any  # int32: alarms since its last rollback order; -1 = no order
    cut: Any  # int32: alarms since its last cut; -1 = no cut
    last_onset: Any  # int32: onset of the last incident with a rollback order; -1 = no order
    escalations: Any  # int32: earlier recoveries in the region of the last recovery


class BudgetState(NamedTuple):
    """The remaining budget."""

    recoveries: Any  # int32: rollbacks left
    lr_cuts: Any  # int32: cuts left
    healthy: Any  # int32: consecutive steps without an incident since the last refund


class Orders(NamedTuple):
    """Orders of one step that the budget allows."""

    recover: Any  # bool: roll back
    depth: Any  # int32: known-good checkpoint to restore, 1 = newest; 0 without a rollback
    cut: Any  # bool: cut the learning rate
    stop: Any  # bool: the rollbacks are exhausted, and the step is not finite
    alert: Any  # bool: the rollbacks are exhausted, and the run continues
    refund: Any  # bool: refund one rollback and one cut
    healthy: Any  # bool: no alarm, and no incident is open in which the model may get worse


def init() -> IncidentState:
    """The state before the first incident."""
    zero, no_order = np.zeros((), np.int32), np.full((), -1, np.int32)
    return IncidentState(
        open=np.zeros((), bool),
        skipped=np.zeros((), bool),
        number=zero,
        onset=no_order,
        quiet=zero.copy(),
        recovered=no_order.copy(),
        cut=no_order.copy(),
        last_onset=no_order.copy(),
        escalations=zero.copy(),
    )


def full_budget(config: BudgetConfig) -> BudgetState:
    """The initial budget; its arrays have the shapes of the configured numbers."""
    return BudgetState(
        np.asarray(config.recoveries, np.int32),
        np.asarray(config.lr_cuts, np.int32),
        np.zeros((), np.int32),
    )


def causes(config: EngineConfig) -> int:
    """`Cause` flags that open an incident: non-finite values, and causes on which a rule acts."""
    mask = _NONFINITE
    for rule in config.rules:
        if rule.skip or rule.action & ACTS:
            mask |= rule.causes
    return mask


def may_recover(config: EngineConfig) -> bool:
    """Whether a rule can order a rollback or a cut of the learning rate."""
    return any(rule.action & int(Action.ROLLBACK | Action.CUT_LR) for rule in config.rules)


def update(
    config: EngineConfig,
    state: IncidentState,
    budget: BudgetState,
    step: Any,
    cause: Any,
    skip: Any,
    wants_recovery: Any,
    wants_cut: Any,
    *,
    xp: Any,
) -> tuple[IncidentState, BudgetState, Orders]:
    """Updates incidents and budget by one step, and grants the orders of the rules.

    Args:
        config: the policy.
        state: incidents before this step.
        budget: the budget before this step.
        step: int32: index of this step.
        cause: int32: `Cause` flags of this step.
        skip: bool: the step is skipped.
        wants_recovery: bool: a rule with ROLLBACK fired.
        wants_cut: bool: a rule with CUT_LR fired.
        xp: the array namespace.
    """
    incident_cause = cause & causes(config)
    alarm = incident_cause != 0
    # A step is harmless if it is skipped only because it is not finite. If such steps order a
    # recovery, their incident is an ordinary one.
    harmless = skip & ((incident_cause & ~_NONFINITE) == 0)
    orders_recovery = numerics.shared(harmless & (wants_recovery | wants_cut), xp=xp)
    harmless = numerics.shared(harmless & ~orders_recovery, xp=xp)
    incident_begun = alarm & ~harmless & ~state.open & ~(orders_recovery & state.skipped)
    skip_begun = alarm & harmless & ~state.open & ~state.skipped
    opened = numerics.shared(incident_begun | skip_begun, xp=xp)
    quiet_steps = xp.where(state.open | state.skipped, state.quiet + 1, 0)
    quiet = xp.where(alarm, xp.where(harmless & state.open, state.quiet, 0), quiet_steps)
    lasts = quiet < config.incident.quiet_steps
    is_open = numerics.shared((state.open | incident_begun | orders_recovery) & lasts, xp=xp)
    skipped = ((state.skipped & ~incident_begun & ~orders_recovery) | skip_begun) & lasts
    onset = xp.where(opened, step, state.onset)
    healthy = numerics.shared(~is_open & ~alarm, xp=xp)
    number = xp.where(opened, state.number + 1, state.number)
    if not may_recover(config):
        never = healthy & ~healthy
        new = state._replace(open=is_open, skipped=skipped, number=number, onset=onset, quiet=quiet)
        return new, budget, Orders(never, state.quiet * 0, never, never, never, never, healthy)

    patience = config.incident.patience
    recovered = xp.where(opened, -1, state.recovered)
    cut = xp.where(opened, -1, state.cut)
    cut_due = wants_cut & ((cut < 0) | (cut >= patience))
    # A cut repeats the rollback order, because the host may have declined an earlier one.
    recover = wants_recovery & ((recovered < 0) | (recovered >= patience) | cut_due)
    recover, cut_due = numerics.shared(recover, xp=xp), numerics.shared(cut_due, xp=xp)
    recovered = xp.where(recover, 0, _count_alarm(recovered, alarm, xp=xp))
    cut = xp.where(cut_due, 0, _count_alarm(cut, alarm, xp=xp))

    again = (state.last_onset >= 0) & (onset - state.last_onset < config.rollback.region)
    # A rollback also resets the step counter, so an earlier onset is in the same region.
    escalations = xp.where(recover, xp.where(again, state.escalations + 1, 0), state.escalations)
    depth = config.rollback.depth + config.rollback.deepen * escalations
    new_budget, orders = _grant(
        config.budget, budget, recover, cut_due, depth, healthy, is_open, cause, xp=xp
    )
    return (
        IncidentState(
            open=is_open,
            skipped=skipped,
            number=number,
            onset=onset,
            quiet=quiet,
            recovered=recovered,
            cut=cut,
            last_onset=xp.where(recover, onset, state.last_onset),
            escalations=escalations,
        ),
        new_budget,
        orders,
    )


def _count_alarm(since: Any, alarm: Any, *, xp: Any) -> Any:
    """Counts an alarm since an order; -1 (no order yet) stays."""
    return xp.where(alarm & (since >= 0), since + 1, since)


def _grant(
    config: BudgetConfig,
    state: BudgetState,
    recover: Any,
    cut: Any,
    depth: Any,
    healthy: Any,
    in_incident: Any,
    cause: Any,
    *,
    xp: Any,
) -> tuple[BudgetState, Orders]:
    """Grants orders within the budget, subtracts a cut, and refunds after long health.

    `Engine.on_rollback` subtracts a rollback. A step in an incident resets the count of healthy
    steps. A skipped non-finite step outside an incident leaves the count unchanged.
    """
    denied = recover & ~(state.recoveries > 0)
    nonfinite = (cause & _NONFINITE) != 0
    count = xp.where(healthy, state.healthy + 1, state.healthy)
    count = xp.where(in_incident | recover | cut, 0, count)
    refund = numerics.shared(count >= config.refund_after, xp=xp)
    granted = numerics.shared(recover & (state.recoveries > 0), xp=xp)
    orders = Orders(
        recover=granted,
        depth=xp.where(granted, depth, 0),
        cut=numerics.shared(cut & (state.lr_cuts > 0), xp=xp),
        stop=denied & nonfinite,
        alert=denied & ~nonfinite,
        refund=refund,
        healthy=healthy,
    )
    recoveries = state.recoveries
    lr_cuts = xp.where(orders.cut, state.lr_cuts - 1, state.lr_cuts)
    return BudgetState(
        recoveries=xp.where(refund & (recoveries < config.recoveries), recoveries + 1, recoveries),
        lr_cuts=xp.where(refund & (lr_cuts < config.lr_cuts), lr_cuts + 1, lr_cuts),
        healthy=xp.where(refund, 0, count),
    ), orders
