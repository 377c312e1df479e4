"""The tables `[incident]`, `[rollback]`, `[lr]` and `[budget]`: how a run recovers, how often."""

from __future__ import annotations

from typing import Annotated, Literal

from healcore.core.engine import BudgetConfig, IncidentConfig, LrConfig, RollbackConfig
from healcore.policy.table import AtMost, Table
from healcore.policy.values import Fraction, Number, OneOf, OnOff, Steps, StepsOrZero, Whole

_incident, _rollback, _lr, _budget = IncidentConfig(), RollbackConfig(), LrConfig(), BudgetConfig()
_Answer = Literal["alert", "rollback", "stop"]
_Few = Annotated[int, Whole(least=0, most=1000)]


class IncidentPolicy(Table):
    """Where one incident ends and the next begins."""

    core = IncidentConfig

    quiet_steps: Steps = _incident.quiet_steps
    patience: Steps = _incident.patience


class Rollback(Table):
    """Which checkpoint a rollback restores, and when."""

    core = RollbackConfig
    host_only = frozenset(
        {"probation", "skip_batches", "confirm", "evidence", "nonfinite_state", "reset_moments"}
    )

    depth: Annotated[int, Whole(least=1, most=1000)] = _rollback.depth
    deepen: _Few = _rollback.deepen
    region: StepsOrZero = _rollback.region
    probation: Steps = 100
    skip_batches: StepsOrZero = 0
    confirm: OnOff = False
    evidence: Annotated[float, Number(least=10)] = 1e4
    nonfinite_state: Annotated[_Answer, OneOf.of(_Answer)] = "rollback"
    reset_moments: OnOff = False


class Lr(Table):
    """Soft steps; the cut of the rate, and the ramp after it, to exactly 1 or to the ceiling."""

    core = LrConfig
    at_most = (AtMost("floor", "factor", "larger", "the first cut would not reach it"),)

    factor: Fraction = _lr.factor
    floor: Annotated[float, Number(above=0, most=1)] = _lr.floor
    hold_steps: StepsOrZero = _lr.hold_steps
    ramp_steps: StepsOrZero = _lr.ramp_steps
    ceiling: Annotated[float, Number(least=0, most=1)] = _lr.ceiling
    soft_step: Fraction = _lr.soft_step
    reset_moments: OnOff = _lr.reset_moments


class Budget(Table):
    """How often a run may recover. With no recovery left, a run that is not finite is stopped."""

    core = BudgetConfig
    host_only = frozenset({"shrinks"})

    recoveries: _Few = _budget.recoveries
    lr_cuts: _Few = _budget.lr_cuts
    shrinks: _Few = 6
    refund_after: Steps = _budget.refund_after
