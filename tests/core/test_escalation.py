"""Incidents, escalation, budgets and refunds."""

from __future__ import annotations

import numpy as np

from healcore.core.engine import BudgetConfig, IncidentConfig, RollbackConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching

BAD = int(Cause.NONFINITE_LOSS)
CONFIG = watching(
    "nonfinite", RuleConfig(BAD, action=int(Action.ROLLBACK | Action.CUT_LR))
)._replace(
    incident=IncidentConfig(quiet_steps=5, patience=10),
    rollback=RollbackConfig(depth=1, deepen=2, region=50),
    budget=BudgetConfig(recoveries=3, lr_cuts=2, refund_after=30),
)


def bad(steps: int, *at: int) -> np.ndarray:
    losses = np.ones(steps)
    losses[list(at)] = np.nan
    return losses


def where(decisions, action: Action) -> list[int]:
    return np.flatnonzero(ordered(decisions, action)).tolist()


def depths(decisions) -> dict[int, int]:
    return {i: int(d.rollback_depth) for i, d in enumerate(decisions) if d.rollback_depth}


def test_one_incident_has_one_order():
    runner = Runner(CONFIG)
    decisions = runner.feed(loss=bad(40, 10, 11, 12, 15, 18))
    assert depths(decisions) == {10: 1}
    assert runner.state.incident.number == 1
    assert runner.state.budget.recoveries == 3, "an order that is not carried out costs nothing"


def carrying_out(runner: Runner, **signals: np.ndarray) -> list:
    """Feeds steps, and subtracts every rollback as it is carried out; detectors stay."""
    decisions = []
    for values in zip(*signals.values(), strict=True):
        decisions.append(runner.step(**dict(zip(signals, values, strict=True))))
        if decisions[-1].action & int(Action.ROLLBACK):
            back = runner.engine.on_rollback(runner.state, runner.state, xp=np)
            runner.state = runner.state._replace(budget=back.budget)
    return decisions


def test_quiet_steps_end_it():
    for steps, incidents in (((10, 14), 1), ((10, 16, 22), 3)):
        runner = Runner(CONFIG)
        runner.feed(loss=bad(100, *steps))
        assert runner.state.incident.number == incidents


def test_the_second_in_the_region_goes_deeper_and_a_far_one_does_not():
    decisions = Runner(CONFIG).feed(loss=bad(200, 10, 40, 80, 150))
    assert depths(decisions) == {10: 1, 40: 3, 80: 5, 150: 1}


def test_alarms_that_go_on_after_patience_escalate():
    decisions = Runner(CONFIG).feed(loss=bad(60, *range(20, 45)))
    assert depths(decisions) == {20: 1, 31: 3, 42: 5}


def test_an_exhausted_budget_stops_the_run_and_rolls_nothing_back():
    runner = Runner(CONFIG._replace(budget=BudgetConfig(recoveries=2, refund_after=1 << 20)))
    decisions = carrying_out(runner, loss=bad(200, 10, 70, 130, 190))
    assert list(depths(decisions)) == [10, 70]
    assert where(decisions, Action.STOP) == [130, 190]
    assert runner.state.budget.recoveries == 0


# With no recovery left: stop where going on is worse than standing still, else an alert.

FINITE = watching(
    "loss_ceiling",
    RuleConfig(int(Cause.DIVERGENCE), action=int(Action.ROLLBACK)),
    ceiling=5.0,
    first_steps=0,
)._replace(
    incident=IncidentConfig(quiet_steps=5, patience=10),
    budget=BudgetConfig(recoveries=1, refund_after=1 << 20),
)


def test_a_run_whose_numbers_are_finite_goes_on_with_an_alert():
    losses = np.ones(100)
    losses[[10, 30, 50]] = 9.0
    runner = Runner(FINITE)
    decisions = carrying_out(runner, loss=losses)
    assert where(decisions, Action.ROLLBACK) == [10]
    assert where(decisions, Action.ALERT) == [30, 50]
    assert where(decisions, Action.STOP) == []
    assert depths(decisions) == {10: 1}
    assert runner.state.budget.recoveries == 0


def test_cuts_have_a_budget_of_their_own():
    decisions = Runner(CONFIG).feed(loss=bad(50, 5, 15, 25))
    assert where(decisions, Action.CUT_LR) == [5, 15]
    assert len(depths(decisions)) == 3


def test_a_cause_that_only_alerts_opens_no_incident():
    config = watching(
        "plateau", RuleConfig(int(Cause.PLATEAU), action=int(Action.ALERT)), window=10, patience=1
    )
    runner = Runner(config)
    runner.feed(loss=np.ones(100))
    assert runner.state.tally.alarms > 0
    assert runner.state.incident.number == 0
    assert not runner.state.incident.open


def test_a_stop_rule_stops():
    config = watching("nonfinite", RuleConfig(BAD, action=int(Action.STOP), consecutive=4))
    decisions = Runner(config).feed(loss=bad(20, 5, 6, 7, 8))
    assert where(decisions, Action.STOP) == [8]
