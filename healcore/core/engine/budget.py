"""How often the engine may act.

With no recoveries left, the run is stopped if its numbers are not finite. Otherwise it continues,
clipped, with an alert: a loss that still grows at a small part of the learning rate, after
rollbacks that did not help, is more likely to grow by design than because of its updates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import BudgetConfig


class BudgetState(NamedTuple):
    """The remaining budget."""

    recoveries: Any  # int32: rollbacks left
    lr_cuts: Any  # int32: cuts left
    healthy: Any  # int32: steps without an incident since the last refund


class Granted(NamedTuple):
    """Which orders are granted."""

    recover: Any  # bool: a rollback
    cut: Any  # bool: a cut
    stop: Any  # bool: no rollback is left, and the step is not finite
    alert: Any  # bool: no rollback is left, and the run goes on
    refund: Any  # bool: one of each is given back


def init(config: BudgetConfig) -> BudgetState:
    """A full budget; with array sizes the state has their shape."""
    return BudgetState(
        np.asarray(config.recoveries, np.int32),
        np.asarray(config.lr_cuts, np.int32),
        np.zeros((), np.int32),
    )


def update(
    config: BudgetConfig,
    state: BudgetState,
    recover: Any,
    cut: Any,
    healthy: Any,
    in_incident: Any,
    nonfinite: Any,
    *,
    xp: Any,
) -> tuple[BudgetState, Granted]:
    """Subtracts the cut that is ordered, and gives back after `refund_after` healthy steps.

    A rollback is subtracted where it is carried out, see `Engine.on_rollback`.

    A step is not `healthy` if it has an alarm or is `in_incident`, where the count starts over; a
    skipped non-finite step alone is only not counted. `nonfinite`: this step is.
    """
    can_recover, can_cut = state.recoveries > 0, state.lr_cuts > 0
    denied = recover & ~can_recover
    count = xp.where(healthy, state.healthy + 1, state.healthy)
    count = xp.where(in_incident | recover | cut, 0, count)
    refund = numerics.shared(count >= config.refund_after, xp=xp)
    granted = Granted(
        recover=numerics.shared(recover & can_recover, xp=xp),
        cut=numerics.shared(cut & can_cut, xp=xp),
        stop=denied & nonfinite,
        alert=denied & ~nonfinite,
        refund=refund,
    )
    left = state.recoveries
    cuts = xp.where(granted.cut, state.lr_cuts - 1, state.lr_cuts)
    return BudgetState(
        recoveries=xp.where(refund & (left < config.recoveries), left + 1, left),
        lr_cuts=xp.where(refund & (cuts < config.lr_cuts), cuts + 1, cuts),
        healthy=xp.where(refund, 0, count),
    ), granted
