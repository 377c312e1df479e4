"""Requests of the host: expected changes, external skips, rollbacks, limits; and the modes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from healcore.core.engine import BudgetConfig, Engine, LrConfig, RuleConfig
from healcore.core.tree import map_leaves
from healcore.core.verdict import NONFINITE, Action, Cause
from tests.core import fuzz, oracle, policies
from tests.core.engine_runner import Runner, ordered, same
from tests.core.test_engine import ESCALATION, bad, depths

FULL = policies.full("zclip")


@pytest.mark.parametrize("way", ["signal", "method"])
def test_an_announced_jump_is_no_alarm(way):
    rng, (uninformed, informed) = np.random.default_rng(0), (Runner(FULL), Runner(FULL))
    steps = {"loss": 2 + 0.1 * rng.normal(size=100), "grad_norm": 0.1 + 0.01 * rng.random(100)}
    jump = {"loss": 9 + 0.1 * rng.normal(size=60), "grad_norm": 30 + rng.random(60)}
    uninformed.feed(**steps)
    informed.feed(**steps)
    assert any(d.cause for d in uninformed.feed(**jump))
    if way == "method":
        informed.state = informed.engine.expect_change(informed.state, xp=np)
    flags = (np.arange(60) == 0) & (way == "signal")
    decisions = informed.feed(**jump, change_expected=flags)
    assert not any(d.cause & ~int(Cause.PLATEAU) for d in decisions)


def test_an_externally_skipped_step_changes_nothing_at_all():
    trace = fuzz.signals(np.random.default_rng(3), 120, 20)
    trace = trace._replace(externally_skipped=np.zeros_like(trace.externally_skipped))
    engine = Engine(FULL)
    state = engine.init(batch=(20,))
    for i in range(120):
        garbage = fuzz.at(trace, (i * 7) % 120)._replace(externally_skipped=np.ones(20, bool))
        after, decision = engine.step(state, garbage, xp=np)
        assert same(after, state)
        assert not any(each.any() for each in (decision.skip, decision.action, decision.cause))
        assert (decision.grad_scale == 1).all()
        assert np.array_equal(decision.lr_scale, state.lr.scale)
        state, _ = engine.step(state, fuzz.at(trace, i), xp=np)


def test_observe_judges_as_heal_does_and_enforces_nothing():
    trace = fuzz.signals(np.random.default_rng(4), 200, 20)
    heal, observe = Engine(FULL), Engine(FULL._replace(mode="observe"))
    a = b = heal.init(batch=(20,))
    for i in range(200):
        a, ordered = heal.step(a, fuzz.at(trace, i), xp=np)
        b, enforced = observe.step(b, fuzz.at(trace, i), xp=np)
        # A host would carry out the rollbacks of the first, and nobody the rollbacks of the second.
        due = (ordered.action & int(Action.ROLLBACK)) != 0
        left = a.budget.recoveries - due.astype(np.int32)
        a = a._replace(budget=a.budget._replace(recoveries=left))
        assert same(a, b)
        assert np.array_equal(ordered.cause, enforced.cause)
        assert (enforced.grad_scale == 1).all()
        assert (enforced.lr_scale == 1).all()
        flags = (enforced.skip, enforced.action, enforced.rollback_depth)
        assert not any(flag.any() for flag in flags)


def test_a_rollback_keeps_budgets_and_the_cut_and_takes_the_detectors_back():
    trace = fuzz.signals(np.random.default_rng(5), 200, 30)
    engine = Engine(FULL)
    state = engine.init(batch=(30,))
    for i in range(120):
        state, _ = engine.step(state, fuzz.at(trace, i), xp=np)
        if i == 60:
            restored = state
    back = engine.on_rollback(state, restored, xp=np)
    for part in ("clip", "detectors", "rules", "step", "grace"):
        assert same(getattr(back, part), getattr(restored, part))
    lower = (restored.lr.broken > 0) & (restored.lr.broken < state.lr.broken)
    assert 0 < lower.sum() < len(lower)
    then = oracle.where(lower, restored.lr, state.lr)
    limit = state.lr._replace(broken=then.broken, low=then.low)
    assert same(back.lr, limit), "the cut, or the lower limit of then"
    assert state.budget.healthy.any()
    left = np.maximum(state.budget.recoveries - 1, 0)
    none = np.zeros_like(state.budget.healthy)  # healthy steps count from the rollback on
    assert same(back.budget, state.budget._replace(recoveries=left, healthy=none))
    assert not state.tally.rollbacks.any(), "a step orders rollbacks, it does not carry them out"
    assert same(back.tally, state.tally._replace(rollbacks=state.tally.rollbacks + 1))
    assert not back.incident.open.any()
    assert np.array_equal(back.incident.number, state.incident.number)
    assert same(map_leaves(np.shape, back), map_leaves(np.shape, state))


# -- rollbacks and limits -------------------------------------------------------------------------


def test_an_order_that_is_not_carried_out_never_uses_up_the_budget():
    config = ESCALATION._replace(budget=BudgetConfig(recoveries=1, lr_cuts=0, refund_after=1 << 20))
    runner = Runner(config)
    decisions = runner.feed(loss=bad(400, *range(10, 400, 3)))
    asked = len(range(10, 400, 3)) / ESCALATION.incident.patience
    assert asked / 2 < len(depths(decisions)) <= asked + 1, "once in `patience` alarms"
    assert not ordered(decisions, Action.STOP).any()
    assert runner.state.budget.recoveries == 1


ROLLS_BACK = (RuleConfig(int(Cause.OVERFIT), action=int(Action.ROLLBACK)),)
LR = LrConfig(factor=0.25, floor=0.01, hold_steps=3, ramp_steps=8, ceiling=0.5)
BUDGET = BudgetConfig(recoveries=3, lr_cuts=1, refund_after=1 << 20)


def limited(runner: Runner, limit: float, rate: float | None) -> Any:
    at = rate and np.float32(rate)
    return runner.engine.limit_lr(runner.state, np.float32(limit), at, xp=np)


@pytest.mark.parametrize(("rate", "limit"), [(None, 0.25), (0.5, 0.125), (8.0, 0.5)])
def test_a_limit_holds_from_the_next_step_on_and_the_ramp_does_not_raise_it(rate, limit):
    runner = Runner(ESCALATION._replace(lr=LR, budget=BUDGET, rules=ROLLS_BACK))
    known = {} if rate is None else {"learning_rate": [rate] * 60}
    runner.feed(loss=np.ones(60), **known)
    runner.state = limited(runner, limit, rate)
    decisions = runner.feed(loss=np.ones(60), **known)
    assert [float(d.lr_scale) for d in decisions] == [limit / (rate or 1.0)] * 60
    assert runner.state.budget.lr_cuts == 0
    assert runner.state.tally.lr_cuts == 1


@pytest.mark.parametrize("rate", [None, 0.5])
def test_a_limit_at_the_share_of_the_policy_is_a_cut_of_a_rule(rate):
    """The same multiplier, budget and tally as when a rule cuts at that step."""
    same_share = LR._replace(ceiling=LR.factor)
    plain = ESCALATION._replace(lr=same_share, budget=BUDGET, rules=ROLLS_BACK)
    rule = RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR))
    cutting = plain._replace(rules=(rule,))
    asked, own = Runner(plain), Runner(cutting)
    known = {} if rate is None else {"learning_rate": [rate] * 11}
    for runner in (asked, own):
        runner.feed(loss=bad(11, 10), **known)
    asked.state = limited(asked, (rate or 1.0) * LR.factor, rate)
    without = {"hold": np.int32(0), "ramp": np.int32(0)}  # the limit itself has neither
    assert same(asked.state.lr._replace(**without), own.state.lr._replace(**without))
    assert same(asked.state.budget, own.state.budget)
    assert asked.state.tally.lr_cuts == own.state.tally.lr_cuts == 1


@pytest.mark.parametrize("often", [1.0, 0.5])
def test_the_core_goes_on_as_the_reference_does(often):
    """Lanes carry out some rollbacks with a limit."""
    steps, lanes = 250, 40
    rng = np.random.default_rng(8)
    trace = fuzz.signals(rng, steps, lanes)
    coin = rng.random((steps, lanes)) < often
    limits = (10.0 ** rng.uniform(-5, 0, (steps, lanes))).astype(np.float32)
    config = policies.full("fixed", budget=BudgetConfig(2, 3, refund_after=50))

    engine = Engine(config)
    state, rows, done = engine.init(batch=(lanes,)), [], 0
    for i in range(steps):
        state, decision = engine.step(state, fuzz.at(trace, i), xp=np)
        rows.append(oracle.columns_of(state, decision))
        back = (decision.action & int(Action.ROLLBACK) != 0) & coin[i]
        rolled = engine.on_rollback(state, state, xp=np)
        rolled = engine.limit_lr(rolled, limits[i], trace.learning_rate[i], xp=np)
        state = oracle.where(back, rolled, state)
        done += int(back.sum())
    got = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    assert done > lanes

    def host(machine: Any, verdict: Any, i: int, lane: int, rate: float) -> None:
        if verdict.action & Action.ROLLBACK and coin[i, lane]:
            machine.roll_back()
            machine.limit_lr(float(limits[i, lane]), rate)

    expected = oracle.reference_run(config, trace, host=host)  # type: ignore[arg-type]
    outcome = oracle.compare(expected, got)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.steps >= 0.9 * steps * lanes


def test_a_limited_policy_takes_the_rate_and_scales_updates():
    """Also without a rule: the rollback may come from compared weights."""
    for rules, ceiling in itertools.product((ROLLS_BACK, ()), (0.5, 0.0)):
        engine = Engine(ESCALATION._replace(rules=rules, lr=LR._replace(ceiling=ceiling)))
        assert engine.limits_lr == engine.scales_lr == (ceiling > 0)


@pytest.mark.parametrize("rules", [ROLLS_BACK, (RuleConfig(int(NONFINITE), skip=True),)])
def test_before_a_limit_no_decision_depends_on_the_rate(rules):
    trace = fuzz.signals(np.random.default_rng(9), 200, 20)
    engine = Engine(ESCALATION._replace(rules=rules, lr=LR, budget=BUDGET._replace(refund_after=9)))
    a = b = engine.init(batch=(20,))
    for i in range(200):
        if i == 90:
            a, b = (engine.on_rollback(each, each, xp=np) for each in (a, b))
            a, b = (engine.limit_lr(s, np.float32(1e-3), np.float32(1), xp=np) for s in (a, b))
        current = engine.without_limit(b)
        assert current.limits_lr == (i >= 90)
        a, first = engine.step(a, fuzz.at(trace, i), xp=np)
        b, second = current.step(b, fuzz.at(trace, i), xp=np)
        assert same(first, second)
    assert len(np.unique(first.lr_scale)) > 1
