"""Incidents, escalation, budgets and refunds."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.engine import (
    BudgetConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
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


def test_alarms_that_go_on_after_patience_escalate():
    decisions = Runner(CONFIG).feed(loss=bad(60, *range(20, 45)))
    assert depths(decisions) == {20: 1, 31: 3, 42: 5}


def test_an_exhausted_budget_stops_the_run_and_rolls_nothing_back():
    runner = Runner(CONFIG._replace(budget=BudgetConfig(recoveries=2, refund_after=1 << 20)))
    decisions = carrying_out(runner, loss=bad(200, 10, 70, 130, 190))
    assert list(depths(decisions)) == [10, 70]
    assert np.flatnonzero(ordered(decisions, Action.STOP)).tolist() == [130, 190]
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


def where(decisions, action: Action) -> list[int]:
    return np.flatnonzero(ordered(decisions, action)).tolist()


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


def test_the_alert_comes_once_per_escalation_not_at_each_step():
    losses = np.ones(100)
    losses[10] = 9.0
    losses[30:60] = 9.0
    decisions = carrying_out(Runner(FINITE), loss=losses)
    assert where(decisions, Action.ALERT) == [30, 41, 52]


@pytest.mark.parametrize("cuts", [0, 4])
def test_nothing_finite_stops_it_whatever_else_could_be_cut(cuts):
    config = CONFIG._replace(budget=BudgetConfig(recoveries=0, lr_cuts=cuts))
    decisions = Runner(config).feed(loss=bad(30, 10))
    assert where(decisions, Action.STOP) == [10]
    assert where(decisions, Action.ALERT) == []


def test_one_nan_within_a_finite_trouble_is_what_it_is_asked_at():
    """The cause at the step that requests the recovery counts, not earlier causes."""
    both = RuleConfig(
        int(Cause.DIVERGENCE | Cause.NONFINITE_LOSS), action=int(Action.ROLLBACK), consecutive=2
    )
    base = FINITE._replace(
        detectors=(*watching("nonfinite").detectors, *FINITE.detectors),
        rules=(both,),
        budget=BudgetConfig(recoveries=0),
    )
    losses = np.ones(20)
    losses[[5, 6]] = np.nan, 9.0
    decisions = Runner(base).feed(loss=losses)
    assert (where(decisions, Action.STOP), where(decisions, Action.ALERT)) == ([], [6])
    losses[[5, 6]] = 9.0, np.nan
    decisions = Runner(base).feed(loss=losses)
    assert (where(decisions, Action.STOP), where(decisions, Action.ALERT)) == ([6], [])


def growing(runs: int) -> dict[str, np.ndarray]:
    """Loss and norm double for eight steps, again and again, each time to a thousandfold height."""
    once = np.r_[np.zeros(42), 2.0 ** np.arange(8)]
    grown = np.concatenate([1000.0**run * once for run in range(runs)])
    return {"loss": 2 + grown, "grad_norm": 1 + 30 * grown}


INSTABLE = int(Cause.INSTABILITY)


def unstable(*rules: RuleConfig, **budget: int):
    return watching("instability", *rules)._replace(
        incident=IncidentConfig(quiet_steps=5, patience=1000),
        budget=BudgetConfig(refund_after=1 << 20, **budget),
    )


@pytest.mark.parametrize("action", [Action.ROLLBACK, Action.ROLLBACK | Action.CUT_LR])
def test_a_finite_loss_that_still_grows_does_not_stop_the_run(action):
    """Neither going back nor cuts have helped: it is more likely to grow by design."""
    rule = RuleConfig(INSTABLE, action=int(action))
    decisions = carrying_out(Runner(unstable(rule, recoveries=1, lr_cuts=3)), **growing(5))
    assert len(where(decisions, Action.ROLLBACK)) == 1
    assert len(where(decisions, Action.CUT_LR)) == (3 if action & Action.CUT_LR else 0)
    assert len(where(decisions, Action.ALERT)) == 4
    assert where(decisions, Action.STOP) == []


def test_rollbacks_are_counted_where_they_are_carried_out():
    runner = Runner(CONFIG)
    saved = runner.state
    runner.feed(loss=bad(12, 10))
    assert runner.engine.metrics(runner.state)["heal/rollbacks"] == 0
    runner.state = runner.engine.on_rollback(runner.state, saved, xp=np)
    assert runner.engine.metrics(runner.state)["heal/rollbacks"] == 1
    runner.feed(loss=bad(30, 20))
    assert runner.engine.metrics(runner.state)["heal/rollbacks"] == 1


def test_a_refund_after_long_health_and_never_above_the_full_budget():
    runner = Runner(CONFIG)
    carrying_out(runner, loss=bad(20, 10))
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


def test_a_cause_that_only_alerts_opens_no_incident():
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


# A skipped non-finite step has changed nothing: it is no part of other trouble.

SKIPS_NAN = FINITE._replace(
    detectors=(*watching("nonfinite").detectors, *FINITE.detectors),
    rules=(
        RuleConfig(BAD, skip=True),
        RuleConfig(int(Cause.DIVERGENCE), action=int(Action.ROLLBACK | Action.CUT_LR)),
    ),
    lr=LrConfig(factor=0.25, floor=0.01, hold_steps=4, ramp_steps=4, ceiling=0.25),
    budget=BudgetConfig(recoveries=3, lr_cuts=3, refund_after=40),
)


def with_high(losses: np.ndarray, *at: int) -> np.ndarray:
    losses[list(at)] = 9.0
    return losses


def test_a_skipped_step_is_no_onset_of_other_trouble():
    runner = Runner(SKIPS_NAN)
    runner.feed(loss=with_high(bad(15, 8, 10, 12), 14))
    assert (runner.state.incident.number, runner.state.incident.onset) == (2, 14)
    assert runner.state.incident.open


def test_skipped_steps_do_not_prolong_other_trouble():
    """It ends after five steps without an alarm: 11, 13, 15, 17 and 19."""
    runner = Runner(SKIPS_NAN)
    losses = with_high(bad(60, *range(12, 60, 2)), 10)
    runner.feed(loss=losses[:19])
    assert runner.state.incident.open
    runner.feed(loss=losses[19:20])
    assert not runner.state.incident.open


def test_an_overflow_after_other_trouble_is_part_of_it():
    runner = Runner(SKIPS_NAN)
    runner.feed(loss=with_high(bad(60, *range(11, 60)), 10))
    assert (runner.state.incident.number, runner.state.incident.onset) == (1, 10)


def test_the_rate_comes_back_and_the_budget_is_refunded_although_steps_are_skipped():
    runner = Runner(SKIPS_NAN)
    decisions = runner.feed(
        loss=with_high(bad(120, *range(4, 120, 4)), 10), learning_rate=[1.0] * 120
    )
    assert decisions[10].lr_scale == 0.25
    assert decisions[40].lr_scale == 0.25  # the ceiling
    assert runner.state.lr.hold == runner.state.lr.ramp == 0
    assert runner.state.budget.recoveries == 3


@pytest.mark.parametrize("cause", [9.0, np.nan])
def test_the_ceiling_holds_while_an_incident_is_open(cause: float):
    """The schedule rises by 100 right after an alarm: the rate that broke it is known."""
    losses, rates = with_high(np.ones(60), 10), np.where(np.arange(60) < 40, 1e-3, 0.1)
    rates[10], losses[39] = 0.1, cause
    scales = [d.lr_scale for d in Runner(SKIPS_NAN).feed(loss=losses, learning_rate=rates)]
    assert (np.array(scales[40:50]) * 0.1 <= 0.025 * 1.0001).all()
