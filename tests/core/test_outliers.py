"""Outliers of a window, a moving average and the first norms: their alarms and their escape."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, alarms, ordered, sustained, watching

WINDOWS = {
    "loss_window": ("loss", Cause.LOSS_SPIKE),
    "grad_window": ("grad_norm", Cause.GRAD_SPIKE),
}
NORMS = ("grad_window", "grad_ema", "grad_ceiling")
ALL = [*WINDOWS, "grad_ema", "grad_ceiling"]
# Steps of a lasting rise of x30 that are out of line; measured: 30 to 33 over ten seeds, 25, 100.
BOUNDS = {"grad_window": 40, "grad_ema": 25, "grad_ceiling": 100}


def scatter(steps: int, seed: int = 0) -> np.ndarray:
    """Norms, lognormal(0.1)."""
    return np.exp(0.1 * np.random.default_rng(seed).normal(size=steps))


def run(name: str, values: np.ndarray, **settings) -> np.ndarray:
    """The steps that a detector finds out of line."""
    signal, cause = WINDOWS.get(name, ("grad_norm", Cause.GRAD_SPIKE))
    return alarms(Runner(watching(name, **settings)).feed(**{signal: values}), cause)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("name", ALL)
def test_a_spike_is_one_alarm_at_any_scale(name, scale):
    values = scatter(300)
    values[200] = 40
    assert np.flatnonzero(run(name, scale * values)).tolist() == [200]


@pytest.mark.parametrize("name", ALL)
def test_zeros_are_no_unit_and_constants_have_one_percent_free(name):
    values = np.zeros(400)
    values[200:] = 1.0
    values[300] = 1.0005
    found = np.flatnonzero(run(name, values))
    assert not (found == 200).any()
    assert not (found >= 300).any()


@pytest.mark.parametrize("name", NORMS)
def test_a_lasting_level_is_accepted_within_the_bound(name):
    for seed in range(3):
        values = scatter(700, seed)
        values[300:] *= 30
        found = np.flatnonzero(run(name, values))
        assert found[0] == 300
        assert found[-1] < 300 + BOUNDS[name], seed


@pytest.mark.parametrize("name", [*WINDOWS, "grad_ema"])
def test_non_numbers_teach_nothing(name):
    values = scatter(300)
    values[200] = 40
    faulty = np.insert(values, [70, 150, 150], [np.nan, np.inf, np.nan])
    keep = np.delete(np.arange(303), [70, 151, 152])
    np.testing.assert_array_equal(run(name, faulty)[keep], run(name, values))


@pytest.mark.parametrize("name", ALL)
def test_a_row_is_sustained(name):
    signal, cause = WINDOWS.get(name, ("grad_norm", Cause.GRAD_SPIKE))
    values = scatter(300)
    values[150], values[200:210] = 40, 40 * 2.0 ** np.arange(10)
    decisions = Runner(watching(name, sustained(cause))).feed(**{signal: values})
    assert np.flatnonzero(ordered(decisions, Action.ROLLBACK)).tolist() == [204]


def test_an_absolute_ceiling_needs_no_history():
    values = np.r_[200.0, 50.0, 100.0, 101.0]
    found = run("grad_ceiling", values, ceiling=100.0, first_ratio=None)
    assert found.tolist() == [True, False, False, True]
