"""The learning rate's multiplier: cut, floor, hold, and a ramp that ends at exactly 1.0.

Or, with a ceiling, below the rate that broke the run, in the schedule's own shape.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.engine import BudgetConfig, IncidentConfig, LrConfig, RuleConfig
from healcore.core.tree import leaves
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching
from tests.core.random_policies import BOUNDED

CONFIG = watching(
    "nonfinite", RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR))
)._replace(
    incident=IncidentConfig(quiet_steps=3, patience=1),
    lr=LrConfig(factor=0.5, floor=0.2, hold_steps=4, ramp_steps=5),
    budget=BudgetConfig(lr_cuts=100),
)


def scales(steps: int, *at: int, config=CONFIG) -> np.ndarray:
    losses = np.ones(steps)
    losses[list(at)] = np.nan
    return np.array([d.lr_scale for d in Runner(config).feed(loss=losses)])


def test_the_whole_way():
    # Cut at 2; open until 4 (three quiet steps); held for four; then five steps up.
    expected = [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]
    np.testing.assert_allclose(scales(15, 2), expected, rtol=1e-6)
    assert scales(15, 2)[13] == 1.0


@pytest.mark.parametrize("ramp_steps", [1, 2, 3, 7, 10, 97, 200, 1000])
def test_the_ramp_rises_and_ends_at_exactly_one(ramp_steps):
    config = CONFIG._replace(lr=LrConfig(0.37, 0.1, hold_steps=2, ramp_steps=ramp_steps))
    got = scales(ramp_steps + 20, 2, config=config)
    assert got.dtype == np.float32
    assert (np.diff(got[2:]) >= 0).all()
    assert (got <= 1).all()
    assert got[2] == np.float32(0.37)
    assert (got[6 + ramp_steps :] == 1).all()
    assert got[5 + ramp_steps] < 1 or ramp_steps == 1


def test_repeated_cuts_multiply_down_to_the_floor():
    got = scales(40, *range(2, 12))
    assert got.min() == np.float32(0.2)
    assert np.isclose(got[[2, 4, 6]], [0.5, 0.25, 0.2]).all()


def test_a_cut_on_the_ramp_cuts_what_is_in_force():
    got = scales(40, 2, 11)
    np.testing.assert_allclose(got[11], 0.5 * got[10], rtol=1e-6)


def test_a_floor_above_the_multiplier_does_not_raise_it():
    config = CONFIG._replace(lr=LrConfig(factor=0.9, floor=0.95, hold_steps=1, ramp_steps=1))
    got = scales(10, 2, config=config)
    assert got[2] == np.float32(0.95)
    assert (got <= 1).all()


def test_without_hold_and_ramp_it_is_back_at_once():
    config = CONFIG._replace(lr=LrConfig(0.5, 0.1, hold_steps=0, ramp_steps=0))
    np.testing.assert_array_equal(scales(8, 2, config=config), [1, 1, 0.5, 0.5, 0.5, 1, 1, 1])


def test_an_incident_stops_the_way_back():
    healthy, troubled = scales(30, 2), scales(30, 2, 10)
    quiet_rule = CONFIG._replace(
        rules=(
            *CONFIG.rules[:0],
            RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR), consecutive=99),
        )
    )
    assert (scales(30, 2, config=quiet_rule) == 1).all()
    assert troubled[12] < healthy[12]


# -- a ceiling ------------------------------------------------------------------------------------

LIMITED = CONFIG._replace(lr=LrConfig(0.25, 0.05, hold_steps=4, ramp_steps=5, ceiling=0.5))


def under(schedule: np.ndarray, *at: int, config=LIMITED) -> np.ndarray:
    """Multipliers along a schedule, with cuts at some steps."""
    losses = np.ones(len(schedule))
    losses[list(at)] = np.nan
    decisions = Runner(config).feed(loss=losses, learning_rate=schedule)
    return np.array([d.lr_scale for d in decisions])


def test_the_way_back_ends_at_the_ceiling():
    expected = [1, 1, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.5]
    got = scales(15, 2, config=LIMITED)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got[13] == np.float32(0.5)
    # Without a rate the schedule is taken to be constant: any constant is the same.
    np.testing.assert_allclose(under(np.full(15, 3e-4), 2), expected, rtol=1e-6)


@pytest.mark.parametrize("oddity", [np.nan, np.inf, -np.inf, 0.0, -1.0, 1e-40, 1e13, 3e38])
def test_an_invalid_rate_is_taken_as_one(oddity):
    np.testing.assert_array_equal(under(np.full(40, oddity), 2, 30), under(np.ones(40), 2, 30))


def test_the_second_breakage_halves_the_ceiling_again():
    got = under(np.full(60, 1e-3), 2, 30)
    np.testing.assert_allclose(got[[29, 30, 59]], [0.5, 0.125, 0.25], rtol=1e-6)


def test_below_the_ceiling_the_schedule_keeps_its_shape():
    schedule = 0.5 * (1 + np.cos(np.pi * np.arange(200) / 200))
    got = under(schedule, 2)[13:-3]  # at its end a cosine falls to a quarter in one step
    assert (got == got[0]).all()
    np.testing.assert_allclose(got[0], 0.5, rtol=1e-6)


def test_a_schedule_that_has_decayed_before_the_cut_is_scaled_from_there():
    schedule = 0.5 * (1 + np.cos(np.pi * np.arange(200) / 200))
    np.testing.assert_allclose(under(schedule, 150)[170:-3], 0.5, rtol=1e-6)


def test_a_schedule_that_rises_after_the_cut_is_scaled_by_its_highest_rate():
    schedule = np.concatenate([np.linspace(0.1, 1, 50), np.linspace(1, 0.1, 50)])
    got = under(schedule, 10) * schedule
    np.testing.assert_allclose(got[49], 0.5 * schedule[10], rtol=1e-5)
    np.testing.assert_allclose(got[50:] / schedule[50:], got[49] / schedule[49], rtol=1e-5)


def test_the_end_of_a_wrong_rate_ends_the_cut():
    schedule = np.where((np.arange(60) > 4) & (np.arange(60) < 30), 1.6e-2, 1e-3)
    got = under(schedule, 6)
    np.testing.assert_allclose(got[29], 0.5, rtol=1e-6)
    assert (got[30:] == 1).all(), "exactly"


def test_a_decay_while_it_is_held_keeps_the_rate_not_the_factor():
    """After a cut to a quarter, a schedule that falls to a quarter leaves nothing to cut."""
    schedule = np.where(np.arange(12) < 6, 1.0, 0.25)
    got = under(schedule, 2)
    np.testing.assert_allclose(got[2:6], 0.25, rtol=1e-6)
    assert (got[6:] == 1).all()


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


def test_health_without_end_overflows_nothing():
    config = LIMITED._replace(
        budget=BudgetConfig(lr_cuts=100, refund_after=1),
        lr=LrConfig(0.125, 0.0625, hold_steps=0, ramp_steps=0, ceiling=0.0625),
    )
    runner = Runner(config)
    losses = np.where(np.arange(300) == 2, np.nan, 1.0)
    decisions = runner.feed(loss=losses, learning_rate=np.full(300, 9e11))
    assert decisions[-1].lr_scale > 0
    floats = [leaf for leaf in leaves(runner.state) if leaf.dtype == np.float32]
    assert all(np.isfinite(leaf) for leaf in floats)


def test_the_engine_reports_whether_it_needs_the_rate():
    assert Runner(LIMITED).engine.limits_lr
    assert not Runner(CONFIG).engine.limits_lr, "no ceiling"
    assert Runner(LIMITED._replace(rules=())).engine.limits_lr, "the host may limit it"


def test_before_the_first_cut_no_ceiling_is_in_force():
    schedule = np.geomspace(1e-9, 1e9, 50)
    assert (under(schedule) == 1).all()


def test_while_the_incident_is_open_the_multiplier_stays():
    schedule = np.geomspace(1.0, 0.1, 12)
    config = LIMITED._replace(incident=IncidentConfig(quiet_steps=6, patience=50))
    got = under(schedule, 2, config=config)
    assert (got[2:7] == got[2]).all()
    assert got[8] > got[2]
