"""Rules, incidents, escalation, budgets, and the multiplier of the learning rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.clipping import RULES
from healcore.core.engine import BudgetConfig, IncidentConfig, LrConfig, RollbackConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching
from tests.core.random_policies import BOUNDED

# -- rules ----------------------------------------------------------------------------------------

NOT_FINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
ROLLBACK = int(Action.ROLLBACK)


def fired(rule: RuleConfig, losses, action: Action = Action.ROLLBACK) -> list[int]:
    """The steps at which a rule on losses that are not finite orders `action`."""
    found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), action)
    return np.flatnonzero(found).tolist()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0])
def test_a_gradient_that_is_no_number_is_skipped_under_any_policy(wrong):
    for config in (watching("nonfinite"), watching("vanishing")):
        decision = Runner(config).step(loss=1.0, grad_norm=wrong)
        assert decision.skip


def test_each_signal_has_its_cause():
    runner = Runner(watching("nonfinite"))
    assert runner.step(loss=np.nan, grad_norm=1.0).cause == Cause.NONFINITE_LOSS
    assert runner.step(loss=1.0, grad_norm=np.inf).cause == Cause.NONFINITE_GRAD
    assert runner.step(loss=np.inf, grad_norm=np.nan).cause == NOT_FINITE
    assert runner.step(loss=1.0, grad_norm=1.0, update_norm=np.nan).cause == Cause.NONFINITE_GRAD
    assert runner.step(loss=1.0, grad_norm=1.0).cause == 0


def test_a_loss_that_is_no_number_is_skipped_where_a_rule_orders_it():
    without = Runner(watching("nonfinite")).step(loss=np.nan, grad_norm=1.0)
    skipping = Runner(watching("nonfinite", RuleConfig(NOT_FINITE, skip=True)))
    assert not without.skip
    assert skipping.step(loss=np.nan, grad_norm=1.0).skip


def bad(steps: int, *at: int) -> np.ndarray:
    """Losses of which some are NaN."""
    losses = np.ones(steps)
    losses[list(at)] = np.nan
    return losses


def test_in_a_row():
    rule = RuleConfig(NOT_FINITE, action=ROLLBACK, consecutive=3)
    assert fired(rule, bad(9, 1, 2, 4, 5, 6, 7)) == [6]
    # KempnerForge's detector, which counts consecutive steps, misses this for 199 steps.
    every_other = bad(200, *range(1, 200, 2))
    assert not fired(rule, every_other)
    rate = RuleConfig(NOT_FINITE, action=ROLLBACK, count=5, within=20)
    assert fired(rate, every_other)[0] == 9, "at the fifth NaN"


def test_a_window_has_exactly_its_steps_and_an_alert_comes_once_until_quiet_steps_have_passed():
    rule = RuleConfig(NOT_FINITE, action=ROLLBACK, count=2, within=10)
    assert fired(rule, bad(40, 5, 14))
    assert not fired(rule, bad(40, 5, 15))
    alert = RuleConfig(NOT_FINITE, action=int(Action.ALERT))
    # 20 quiet steps lie between the last two only.
    assert fired(alert, bad(100, 10, 11, 12, 20, 60), Action.ALERT) == [10, 60]


SKIP_SPIKES = RuleConfig(int(Cause.GRAD_SPIKE | Cause.NONFINITE_GRAD), skip=True)
SKIPPING = watching("grad_spike", SKIP_SPIKES)._replace(max_skips=4)


def test_a_row_of_outliers_ends_after_max_skips():
    decisions = Runner(SKIPPING).feed(grad_norm=[1.0] * 50 + [100.0] * 10)
    assert [i for i, d in enumerate(decisions) if d.skip] == [50, 51, 52, 53]


def test_a_skipped_step_is_not_clipped_too_and_teaches_the_clip_nothing():
    config = SKIPPING._replace(clip=("zclip", RULES["zclip"]()))
    runner = Runner(config)
    runner.feed(grad_norm=[0.5] * 50)
    before = runner.state.clip
    decision = runner.step(grad_norm=100.0)
    assert decision.skip
    assert decision.grad_scale == 1
    assert runner.state.tally.clips == 0
    for a, b in zip(before[:3], runner.state.clip[:3], strict=True):
        assert a == b


# -- incidents, escalation, budgets and refunds ---------------------------------------------------

BAD = int(Cause.NONFINITE_LOSS)
ESCALATION = watching(
    "nonfinite", RuleConfig(BAD, action=int(Action.ROLLBACK | Action.CUT_LR))
)._replace(
    incident=IncidentConfig(quiet_steps=5, patience=10),
    rollback=RollbackConfig(depth=1, deepen=2, region=50),
    budget=BudgetConfig(recoveries=3, lr_cuts=2, refund_after=30),
)


def where(decisions, action: Action) -> list[int]:
    return np.flatnonzero(ordered(decisions, action)).tolist()


def depths(decisions) -> dict[int, int]:
    return {i: int(d.rollback_depth) for i, d in enumerate(decisions) if d.rollback_depth}


def test_one_incident_has_one_order():
    for steps, incidents in (((10, 14), 1), ((10, 16, 22), 3), ((10, 11, 12, 15, 18), 1)):
        runner = Runner(ESCALATION)
        decisions = runner.feed(loss=bad(100, *steps))
        assert runner.state.incident.number == len(depths(decisions)) == incidents
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


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ((10, 40, 80, 150), {10: 1, 40: 3, 80: 5, 150: 1}),  # the last one in another region
        (range(20, 45), {20: 1, 31: 3, 42: 5}),  # alarms that go on after `patience`
    ],
)
def test_the_next_order_of_the_region_goes_deeper(at, expected):
    assert depths(Runner(ESCALATION).feed(loss=bad(200, *at))) == expected


def test_an_exhausted_budget_stops_the_run_and_rolls_nothing_back():
    runner = Runner(ESCALATION._replace(budget=BudgetConfig(recoveries=2, refund_after=1 << 20)))
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
    decisions = Runner(ESCALATION).feed(loss=bad(50, 5, 15, 25))
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


# -- the multiplier of the learning rate: cut, floor, hold, ramp ----------------------------------

CUTS = watching(
    "nonfinite", RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR))
)._replace(
    incident=IncidentConfig(quiet_steps=3, patience=1),
    lr=LrConfig(factor=0.5, floor=0.2, hold_steps=4, ramp_steps=5),
    budget=BudgetConfig(lr_cuts=100),
)


def scales(steps: int, cut: int, *, config=CUTS, **signals: np.ndarray) -> np.ndarray:
    """Multipliers of a run whose rate is cut at one step."""
    losses = np.where(np.arange(steps) == cut, np.nan, 1.0)
    return np.array([d.lr_scale for d in Runner(config).feed(loss=losses, **signals)])


def test_the_whole_way():
    # Cut at 2; open until 4 (three quiet steps); held for four; then five steps up.
    expected = [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]
    np.testing.assert_allclose(scales(15, 2), expected, rtol=1e-6)
    assert scales(15, 2)[13] == 1.0


@pytest.mark.parametrize("ramp_steps", [1, 2, 3, 7, 10, 97, 200, 1000])
def test_the_ramp_rises_and_ends_at_exactly_one(ramp_steps):
    config = CUTS._replace(lr=LrConfig(0.37, 0.1, hold_steps=2, ramp_steps=ramp_steps))
    got = scales(ramp_steps + 20, 2, config=config)
    assert got.dtype == np.float32
    assert (np.diff(got[2:]) >= 0).all()
    assert (got <= 1).all()
    assert got[2] == np.float32(0.37)
    assert (got[6 + ramp_steps :] == 1).all()
    assert got[5 + ramp_steps] < 1 or ramp_steps == 1


# -- a ceiling ------------------------------------------------------------------------------------

LIMITED = CUTS._replace(lr=LrConfig(0.25, 0.05, hold_steps=4, ramp_steps=5, ceiling=0.5))


def test_the_way_back_ends_at_the_ceiling():
    expected = [1, 1, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5]
    got = scales(15, 2, config=LIMITED)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got[13] == np.float32(0.5)
    # Without a rate the schedule is taken to be constant: any constant is the same.
    constant = scales(15, 2, config=LIMITED, learning_rate=np.full(15, 3e-4))
    np.testing.assert_allclose(constant, expected, rtol=1e-6)


@settings(max_examples=60, **BOUNDED)
@given(
    seed=st.integers(0, 1 << 20),
    factor=st.floats(0.125, 0.875, width=32),
    ceiling=st.floats(0.0625, 1.0, width=32),
    kind=st.sampled_from(["constant", "warm-up", "decay", "steps", "walk"]),
)
def test_it_never_ramps_into_the_rate_that_broke_it(seed, factor, ceiling, kind):
    rng, steps = np.random.default_rng(seed), 120
    t = np.arange(steps) / steps
    schedule = 10.0 ** rng.uniform(-6, 0) * {
        "constant": np.ones(steps),
        "warm-up": 0.01 + t,
        "decay": 1.01 - t,
        "steps": np.where(t < 0.5, 0.1, 1.0),
        "walk": np.exp(np.cumsum(0.3 * rng.normal(size=steps))),
    }[kind].astype(np.float32)
    config = LIMITED._replace(
        lr=LrConfig(factor, 0.05, hold_steps=3, ramp_steps=6, ceiling=ceiling),
        incident=IncidentConfig(quiet_steps=1, patience=1),
    )
    losses = np.where(rng.random(steps) < 0.05, np.nan, 1.0)
    decisions = Runner(config).feed(loss=losses, learning_rate=schedule)
    cut = ordered(decisions, Action.CUT_LR)
    used = np.array([d.lr_scale for d in decisions], np.float64) * schedule
    broke = np.inf
    before = 1.0
    for i in range(steps):
        scale = float(decisions[i].lr_scale)
        assert 0 < scale <= 1
        if cut[i]:
            broke = before * float(schedule[i])
            assert scale <= before, "a cut raises nothing"
        elif np.isfinite(losses[i]):
            assert used[i] <= ceiling * broke * (1 + 1e-5)
        before = scale


def test_long_health_raises_it_until_the_schedule_is_back():
    budget = BudgetConfig(lr_cuts=100, refund_after=20)
    got = scales(120, 2, config=LIMITED._replace(budget=budget))
    # Healthy from 5 on: after 20 steps of health the ceiling is 0.5 / 0.25, which is above 1.
    assert got[23] == np.float32(0.5)
    assert (got[25:] == 1).all()
    lower = LIMITED._replace(budget=budget, lr=LIMITED.lr._replace(factor=0.75, ceiling=0.5))
    got = scales(120, 2, config=lower)
    np.testing.assert_allclose(got[[23, 43, 63]], [0.5, 2 / 3, 8 / 9], rtol=1e-6)
    assert got[-1] == 1
