"""How often the engine may act.

No action is granted once the budget of recoveries is exhausted. The run is then stopped where going
on is worse than standing still (nothing finite to step with, or weights that get worse with each
step); it goes on, clipped, with an alert, where its numbers are finite and do not grow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import BudgetConfig


class BudgetState(NamedTuple):
    """What is left."""

    recoveries: Any
    """int32: rollbacks left."""
    lr_cuts: Any
    """int32: cuts left."""
    healthy: Any
    """int32: steps without an incident since the last refund."""


class Granted(NamedTuple):
    """What of the ordered is granted."""

    recover: Any
    """bool: go back."""
    cut: Any
    """bool: cut."""
    stop: Any
    """bool: a recovery was wanted, none is left, and going on would do harm."""
    alert: Any
    """bool: a recovery was wanted, none is left, and the run goes on."""
    refund: Any
    """bool: long health gives one of each back."""


def init(config: BudgetConfig) -> BudgetState:
    """A full budget; with array budgets the state takes their shape."""
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
    no_incident: Any,
    harmful: Any,
    *,
    xp: Any,
) -> tuple[BudgetState, Granted]:
    """Pays for what is ordered; refunds one of each after long health.

    Args:
        config: sizes.
        state: what is left.
        recover: bool, a rollback is ordered.
        cut: bool, a cut is ordered.
        no_incident: bool, no incident is open.
        harmful: bool, this step is not finite, or the weights are getting worse.
        xp: the array namespace.
    """
    can_recover, can_cut = state.recoveries > 0, state.lr_cuts > 0
    denied = recover & ~can_recover
    healthy = xp.where(no_incident, state.healthy + 1, 0)
    refund = numerics.shared(healthy >= config.refund_after, xp=xp)
    granted = Granted(
        recover=numerics.shared(recover & can_recover, xp=xp),
        cut=numerics.shared(cut & can_cut, xp=xp),
        stop=denied & harmful,
        alert=denied & ~harmful,
        refund=refund,
    )
    left = xp.where(granted.recover, state.recoveries - 1, state.recoveries)
    cuts = xp.where(granted.cut, state.lr_cuts - 1, state.lr_cuts)
    return BudgetState(
        recoveries=xp.where(refund & (left < config.recoveries), left + 1, left),
        lr_cuts=xp.where(refund & (cuts < config.lr_cuts), cuts + 1, cuts),
        healthy=xp.where(refund, 0, healthy),
    ), granted
