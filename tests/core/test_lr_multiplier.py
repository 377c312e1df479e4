"""The learning rate's multiplier: cut, floor, hold, and a ramp that ends at exactly 1.0."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.engine import BudgetConfig, IncidentConfig, LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.stepping import Runner, watching

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
    calm, troubled = scales(30, 2), scales(30, 2, 10)
    quiet_rule = CONFIG._replace(
        rules=(
            *CONFIG.rules[:0],
            RuleConfig(int(Cause.NONFINITE_LOSS), action=int(Action.CUT_LR), consecutive=99),
        )
    )
    assert (scales(30, 2, config=quiet_rule) == 1).all()
    assert troubled[12] < calm[12]
