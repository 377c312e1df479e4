"""Requests of the host: it declines a rollback, or asks for a cut of the rate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from healcore.core.engine import BudgetConfig, Engine, LrConfig, RuleConfig
from healcore.core.engine.enforce import pick
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Action, Cause
from tests.core import fuzz, oracle, policies
from tests.core.engine_runner import Runner, ordered
from tests.core.test_escalation import CONFIG as ESCALATION
from tests.core.test_escalation import bad, depths


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def declining(runner: Runner, losses: np.ndarray) -> list:
    """Feeds losses, and declines every rollback."""
    decisions = []
    for loss in losses:
        decisions.append(runner.step(loss=loss))
        if decisions[-1].action & int(Action.ROLLBACK):
            runner.state = runner.engine.decline(runner.state, xp=np)
    return decisions


def test_the_attempt_is_back_and_nothing_else_is_touched():
    trace = fuzz.signals(np.random.default_rng(7), 150, 60)
    engine = Engine(policies.full("fixed"))
    state = engine.init(batch=(60,))
    declined = 0
    for i in range(150):
        state, decision = engine.step(state, fuzz.at(trace, i), xp=np)
        after = engine.decline(state, xp=np)
        left = np.minimum(state.budget.recoveries + 1, 4)
        assert np.array_equal(after.budget.recoveries, left)
        assert (after.incident.last_onset == -1).all()
        back = after._replace(
            incident=after.incident._replace(last_onset=state.incident.last_onset),
            budget=after.budget._replace(recoveries=state.budget.recoveries),
        )
        assert same(back, state)
        assert [leaf.dtype for leaf in leaves(after)] == [leaf.dtype for leaf in leaves(state)]
        declined += int((decision.action & int(Action.ROLLBACK) != 0).sum())
    assert declined > 20


def test_the_next_trouble_is_another_incident_at_the_first_depth():
    runner = Runner(ESCALATION)
    decisions = declining(runner, bad(60, 10, 20, 30, 40))
    assert depths(decisions) == {10: 1, 20: 1, 30: 1, 40: 1}, "never deeper: nothing was tried"
    assert depths(Runner(ESCALATION).feed(loss=bad(60, 10, 20, 30, 40))) == {10: 1, 20: 3, 30: 5}
    assert runner.state.incident.number == 4
    assert runner.state.budget.recoveries == 3
    assert runner.state.tally.rollbacks == 0


def test_a_declined_rollback_never_uses_up_the_budget():
    config = ESCALATION._replace(budget=BudgetConfig(recoveries=1, lr_cuts=0, refund_after=1 << 20))
    runner = Runner(config)
    decisions = declining(runner, bad(400, *range(10, 400, 3)))
    asked = len(range(10, 400, 3)) / ESCALATION.incident.patience
    assert asked / 2 < len(depths(decisions)) <= asked + 1, "once in `patience` alarms"
    assert not ordered(decisions, Action.STOP).any()
    assert runner.state.budget.recoveries == 1


def test_two_declines_give_nothing_more_than_the_budget():
    runner = Runner(ESCALATION)
    runner.feed(loss=bad(12, 10))
    for _ in range(5):
        runner.state = runner.engine.decline(runner.state, xp=np)
    assert runner.state.budget.recoveries == 3


def test_a_cut_that_was_ordered_with_it_stays():
    runner = Runner(ESCALATION)
    decisions = declining(runner, bad(12, 10))
    assert ordered(decisions, Action.CUT_LR)[10]
    assert runner.state.lr.scale == np.float32(0.5)
    assert runner.state.budget.lr_cuts == 1


def test_a_cut_that_is_declined_too_is_as_if_it_had_not_been():
    runner = Runner(ESCALATION)
    (*_, decision) = runner.feed(loss=bad(11, 10))
    assert decision.lr_scale == np.float32(0.5)
    runner.state = runner.engine.decline(runner.state, cut=True, xp=np)
    assert runner.state.budget == Runner(ESCALATION).state.budget
    assert [d.lr_scale for d in runner.feed(loss=np.ones(100))] == [1.0] * 100
    assert runner.state.lr.broken == 0.0, "a rising schedule is not limited by it"


def test_declining_the_second_cut_leaves_the_first():
    config = ESCALATION._replace(lr=LrConfig(factor=0.25, hold_steps=5, ramp_steps=5, ceiling=0.5))
    runner, first = Runner(config), Runner(config)
    runner.feed(loss=bad(40, 10, 30)[:31])
    first.feed(loss=bad(31, 10))
    assert runner.state.lr.scale == np.float32(0.125)
    assert first.state.lr.scale == 0.5, "its ceiling"
    runner.state = runner.engine.decline(runner.state, cut=True, xp=np)
    assert runner.state.lr.scale == 0.5
    assert {d.lr_scale for d in runner.feed(loss=np.ones(25))} == {np.float32(0.5)}
    assert runner.state.budget.lr_cuts == first.state.budget.lr_cuts


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("often", [1.0, 0.5])
def test_the_core_goes_on_as_the_reference_does(often, cut):
    """Lanes decline each ordered rollback, or half of them, with their cuts or without."""
    steps, lanes = 250, 40
    rng = np.random.default_rng(8)
    trace = fuzz.signals(rng, steps, lanes)
    coin = rng.random((steps, lanes)) < often
    config = policies.full("fixed", budget=BudgetConfig(2, 3, refund_after=50))

    engine = Engine(config)
    state, rows, asked = engine.init(batch=(lanes,)), [], []
    for i in range(steps):
        state, decision = engine.step(state, fuzz.at(trace, i), xp=np)
        rows.append(oracle.columns_of(state, decision))
        asked.append((decision.action & int(Action.ROLLBACK) != 0) & coin[i])
        state = map_leaves(
            lambda old, new, where=asked[-1]: pick(where, new, old, xp=np),
            state,
            engine.decline(state, cut=cut, xp=np),
        )
    got = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    assert np.sum(asked) > lanes

    def host(machine: Any, verdict: Any, i: int, lane: int) -> None:
        if verdict.action & Action.ROLLBACK and coin[i, lane]:
            machine.decline(cut=cut)

    expected = oracle.reference_run(config, trace, host=host)
    outcome = oracle.compare(expected, got)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.steps >= 0.9 * steps * lanes


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_cut_that_the_host_asks_for_is_one_of_the_engines_own(rate):
    """The same multiplier, budget and tally as when a rule cuts at that step."""
    lr = LrConfig(factor=0.25, floor=0.01, hold_steps=3, ramp_steps=8, ceiling=0.5)
    budget = BudgetConfig(recoveries=3, lr_cuts=1, refund_after=1 << 20)
    plain = ESCALATION._replace(lr=lr, budget=budget, rules=())
    cutting = plain._replace(
        rules=(RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR)),)
    )
    asked, own = Runner(plain), Runner(cutting)

    def feed(runner: Runner, losses: np.ndarray) -> list:
        known = {} if rate is None else {"learning_rate": [rate] * len(losses)}
        return runner.feed(loss=losses, **known)

    feed(asked, bad(10))
    feed(own, bad(11, 10))
    array = None if rate is None else np.float32(rate)
    asked.state = asked.engine.cut_lr(asked.state, array, xp=np)
    assert same(asked.state.lr, own.state.lr)
    assert asked.state.budget.lr_cuts == own.state.budget.lr_cuts == 0
    assert asked.state.tally.lr_cuts == own.state.tally.lr_cuts == 1
    again = asked.engine.cut_lr(asked.state, array, xp=np)
    assert same(again, asked.state), "the policy has no cut left"
    scales = [d.lr_scale for d in feed(asked, bad(60))]
    assert scales[0] == np.float32(0.25)
    assert scales[-1] == np.float32(0.5), "the ceiling"
