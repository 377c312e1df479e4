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

ACTS = int(Action.ROLLBACK | Action.CUT_LR | Action.STOP | Action.SOFT_STEP)
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
    none, minus = np.zeros((), np.int32), np.full((), -1, np.int32)
    return IncidentState(
        open=np.zeros((), bool),
        skipped=np.zeros((), bool),
        number=none,
        onset=minus,
        quiet=none.copy(),
        recovered=minus.copy(),
        cut=minus.copy(),
        last_onset=minus.copy(),
        escalations=none.copy(),
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
    trouble = cause & causes(config)
    alarm = trouble != 0
    # A step is harmless if it is skipped only because it is not finite. If such steps order a
    # recovery, their incident is an ordinary one.
    harmless = skip & ((trouble & ~_NONFINITE) == 0)
    acts = numerics.shared(harmless & (wants_recovery | wants_cut), xp=xp)
    harmless = numerics.shared(harmless & ~acts, xp=xp)
    begun = alarm & ~harmless & ~state.open & ~(acts & state.skipped)
    skip_begun = alarm & harmless & ~state.open & ~state.skipped
    opened = numerics.shared(begun | skip_begun, xp=xp)
    waited = xp.where(state.open | state.skipped, state.quiet + 1, 0)
    quiet = xp.where(alarm, xp.where(harmless & state.open, state.quiet, 0), waited)
    lasts = quiet < config.incident.quiet_steps
    open_ = numerics.shared((state.open | begun | acts) & lasts, xp=xp)
    skipped = ((state.skipped & ~begun & ~acts) | skip_begun) & lasts
    onset = xp.where(opened, step, state.onset)

    patience = config.incident.patience
    recovered = xp.where(opened, -1, state.recovered)
    cut = xp.where(opened, -1, state.cut)
    cuts = wants_cut & ((cut < 0) | (cut >= patience))
    # A cut repeats the rollback order, because the host may have declined an earlier one.
    recover = wants_recovery & ((recovered < 0) | (recovered >= patience) | cuts)
    recover, cuts = numerics.shared(recover, xp=xp), numerics.shared(cuts, xp=xp)
    recovered = xp.where(recover, 0, _one_more(recovered, alarm, xp=xp))
    cut = xp.where(cuts, 0, _one_more(cut, alarm, xp=xp))

    again = (state.last_onset >= 0) & (onset - state.last_onset < config.rollback.region)
    # A rollback also resets the step counter, so an earlier onset is in the same region.
    escalations = xp.where(recover, xp.where(again, state.escalations + 1, 0), state.escalations)
    depth = config.rollback.depth + config.rollback.deepen * escalations
    healthy = numerics.shared(~open_ & ~alarm, xp=xp)
    after, orders = _grant(
        config.budget, budget, recover, cuts, depth, healthy, open_, cause, xp=xp
    )
    return (
        IncidentState(
            open=open_,
            skipped=skipped,
            number=xp.where(opened, state.number + 1, state.number),
            onset=onset,
            quiet=quiet,
            recovered=recovered,
            cut=cut,
            last_onset=xp.where(recover, onset, state.last_onset),
            escalations=escalations,
        ),
        after,
        orders,
    )


def _one_more(since: Any, alarm: Any, *, xp: Any) -> Any:
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
    left = state.recoveries
    cuts = xp.where(orders.cut, state.lr_cuts - 1, state.lr_cuts)
    return BudgetState(
        recoveries=xp.where(refund & (left < config.recoveries), left + 1, left),
        lr_cuts=xp.where(refund & (cuts < config.lr_cuts), cuts + 1, cuts),
        healthy=xp.where(refund, 0, count),
    ), orders
