"""Incidents, escalation, budgets and refunds."""

from __future__ import annotations

import numpy as np

from healcore.core.engine import BudgetConfig, IncidentConfig, RollbackConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.stepping import Runner, ordered, watching

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


def depths(decisions) -> dict[int, int]:
    return {i: int(d.rollback_depth) for i, d in enumerate(decisions) if d.rollback_depth}


def test_one_incident_spends_one_attempt():
    runner = Runner(CONFIG)
    decisions = runner.feed(loss=bad(40, 10, 11, 12, 15, 18))
    assert depths(decisions) == {10: 1}
    assert runner.state.budget.recoveries == 2
    assert runner.state.incident.number == 1


def test_quiet_steps_end_it():
    runner = Runner(CONFIG)
    runner.feed(loss=bad(100, 10, 14))
    assert runner.state.incident.number == 1
    runner = Runner(CONFIG)
    runner.feed(loss=bad(100, 10, 16, 22))
    assert runner.state.incident.number == 3


def test_the_second_in_the_region_goes_deeper_and_a_far_one_does_not():
    assert depths(Runner(CONFIG).feed(loss=bad(200, 10, 40, 80, 150))) == {
        10: 1,
        40: 3,
        80: 5,
        150: 1,
    }


def test_alarms_that_go_on_after_patience_climb_a_rung():
    decisions = Runner(CONFIG).feed(loss=bad(60, *range(20, 45)))
    assert depths(decisions) == {20: 1, 31: 3, 42: 5}


def test_an_exhausted_budget_stops_the_run_and_rolls_nothing_back():
    runner = Runner(CONFIG._replace(budget=BudgetConfig(recoveries=2, refund_after=1 << 20)))
    decisions = runner.feed(loss=bad(200, 10, 70, 130, 190))
    assert list(depths(decisions)) == [10, 70]
    assert np.flatnonzero(ordered(decisions, Action.STOP)).tolist() == [130, 190]
    assert runner.state.budget.recoveries == 0


def test_a_refund_after_long_health_and_never_above_the_full_purse():
    runner = Runner(CONFIG)
    runner.feed(loss=bad(20, 10))
    assert runner.state.budget.recoveries == 2
    # 10 + 5 quiet steps: the first healthy one is 15, the thirtieth 44.
    runner.feed(loss=bad(24))
    assert runner.state.budget.recoveries == 2
    runner.feed(loss=bad(1))
    assert runner.state.budget.recoveries == 3
    runner.feed(loss=bad(200))
    assert runner.state.budget.recoveries == 3
    assert runner.state.budget.lr_cuts == 2


def test_cuts_have_a_budget_of_their_own():
    decisions = Runner(CONFIG).feed(loss=bad(50, 5, 15, 25))
    assert np.flatnonzero(ordered(decisions, Action.CUT_LR)).tolist() == [5, 15]
    assert len(depths(decisions)) == 3


def test_a_cause_that_is_only_told_opens_no_incident():
    config = watching(
        "plateau",
        RuleConfig(int(Cause.PLATEAU), action=int(Action.ALERT)),
        window=10,
        patience=1,
    )
    runner = Runner(config)
    runner.feed(loss=np.ones(100))
    assert runner.state.tally.alarms > 0
    assert runner.state.incident.number == 0
    assert not runner.state.incident.open


def test_a_stop_rule_stops():
    config = watching("nonfinite", RuleConfig(BAD, action=int(Action.STOP), consecutive=4))
    decisions = Runner(config).feed(loss=bad(20, 5, 6, 7, 8))
    assert np.flatnonzero(ordered(decisions, Action.STOP)).tolist() == [8]
