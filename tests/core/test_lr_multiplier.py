"""The learning rate's multiplier: cut, floor, hold, and a ramp that ends at exactly 1.0.

Or, with a ceiling, below the rate that broke the run, in the schedule's own shape.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.engine import BudgetConfig, IncidentConfig, LrConfig, RuleConfig
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


def scales(steps: int, cut: int, *, config=CONFIG, **signals: np.ndarray) -> np.ndarray:
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
    config = CONFIG._replace(lr=LrConfig(0.37, 0.1, hold_steps=2, ramp_steps=ramp_steps))
    got = scales(ramp_steps + 20, 2, config=config)
    assert got.dtype == np.float32
    assert (np.diff(got[2:]) >= 0).all()
    assert (got <= 1).all()
    assert got[2] == np.float32(0.37)
    assert (got[6 + ramp_steps :] == 1).all()
    assert got[5 + ramp_steps] < 1 or ramp_steps == 1


# -- a ceiling ------------------------------------------------------------------------------------

LIMITED = CONFIG._replace(lr=LrConfig(0.25, 0.05, hold_steps=4, ramp_steps=5, ceiling=0.5))


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
