"""Gradient and update spikes: the same rule on two norms."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, alarms, ordered, sustained, watching

LANES = 100
KINDS = {
    "grad_spike": ("grad_norm", Cause.GRAD_SPIKE),
    "update_spike": ("update_norm", Cause.UPDATE_SPIKE),
}


def norms(steps: int, spread: float = 0.3) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(0).normal(size=(steps, LANES)))


def run(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks)."""
    signal, cause = KINDS[kind]
    runner = Runner(watching(kind, sustained(cause)), lanes=values.shape[1])
    # The update spike has no use for a loss, but a step needs a loss or a gradient norm.
    both = {"loss": np.ones_like(values), signal: values}
    decisions = runner.feed(**both)
    return alarms(decisions, cause), ordered(decisions, Action.ROLLBACK)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_is_one_alarm_at_any_scale(kind, scale):
    values = norms(300, 0.1)
    values[200] = 20
    single, lasting = run(kind, scale * values)
    assert single[200].all()
    assert not np.delete(single, 200, axis=0).any()
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_small_shifts_are_none(kind):
    # Spread of lognormal norms, and how many steps of a thousand may pass for spikes.
    spreads = {0.0: 0, 1e-4: 0, 0.1: 0, 0.3: 0.2, 0.5: 3}
    values = np.concatenate([norms(1000, spread) for spread in spreads], axis=1)
    values[500:] *= 1.5
    single, lasting = run(kind, values)
    by_spread = np.split(single, len(spreads), axis=1)
    for (spread, per_mille), found in zip(spreads.items(), by_spread, strict=True):
        assert 1000 * found.mean() <= per_mille, spread
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_explosion_is_sustained_before_it_overflows(kind):
    """BLOOM-176B's norms grew about fourfold per iteration towards the loss peak."""
    values = norms(260)
    values[250:] *= (4.0 ** np.arange(1, 11))[:, None]
    single, lasting = run(kind, values)
    assert single[252:].all()
    assert lasting[250:257].any(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lasting_level_is_accepted(kind):
    values = norms(600, 0.1)
    values[200:] *= 30
    single, lasting = run(kind, values)
    assert lasting[200:210].any(0).all()
    assert not single[280:].any(), "two windows"


@pytest.mark.parametrize("at", [5, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_in_warm_up_does_not_blind(kind, at):
    values = norms(120, 0.1)
    values[at] = 1e4
    values[60] = 20
    assert run(kind, values)[0][60].all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_non_numbers_teach_nothing(kind):
    values = norms(300)
    values[200] = 20
    clean = run(kind, values)[0]
    for wrong in (0.0, np.nan, np.inf):
        faulty = np.insert(values, [3, 50, 50, 150], wrong, axis=0)
        keep = np.delete(np.arange(304), [3, 51, 52, 153])
        np.testing.assert_array_equal(run(kind, faulty)[0][keep], clean)


def test_an_update_spike_with_steady_gradients():
    """Marin 32B: update norms jumped while clipped gradients stayed steady."""
    runner = Runner(watching("update_spike"))
    steady = np.ones(100)
    updates = 1e-3 * np.ones(100)
    updates[80] = 0.1
    decisions = runner.feed(grad_norm=steady, update_norm=updates)
    assert np.flatnonzero(alarms(decisions, Cause.UPDATE_SPIKE)).tolist() == [80]
