"""Spikes of the loss, the gradient norm and the update norm: one bad value, and several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, alarms, ordered, sustained, watching

SPIKE = Cause.LOSS_SPIKE
CONFIG = watching("loss_spike", sustained(SPIKE))
LANES = 60


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def run(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks ordered), (steps, lanes)."""
    losses = np.asarray(losses, np.float32)
    runner = Runner(CONFIG, lanes=losses.shape[1] if losses.ndim == 2 else 0)
    decisions = runner.feed(loss=losses)
    return alarms(decisions, SPIKE), ordered(decisions, Action.ROLLBACK)


# Loss = offset + unit * noise: positive, near zero, negative, tiny, huge.
UNITS = {
    "ordinary": (2.5, 0.05),
    "near zero": (0.0, 0.01),
    "negative": (-4.0, 0.1),
    "crossing zero": (0.01, 0.1),
    "tiny": (1e-6, 1e-7),
    "huge": (1e9, 1e7),
}


def in_every_unit(shape: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(unit, alarms, rollbacks ordered) for each unit: side by side as lanes of one run."""
    every = [offset + scale * shape for offset, scale in UNITS.values()]
    found = run(np.concatenate(every, axis=1))
    yield from zip(UNITS, *(np.split(x, len(UNITS), axis=1) for x in found), strict=True)


def test_noise_is_no_spike():
    for unit, single, lasting in in_every_unit(noise(1000)):
        assert single.mean() < 1e-3, f"{unit}: single steps: fewer than one in a thousand"
        assert not lasting.any(), unit


def test_a_lasting_rise_is_found_within_ten_steps():
    shape = noise(600)
    shape[400:440] += 20
    for unit, _, lasting in in_every_unit(shape):
        assert not lasting[:400].any(), unit
        assert lasting[400:410].any(0).all(), unit


def test_one_bad_batch_is_an_alarm_and_never_a_rollback():
    shape = noise(600)
    shape[400] += 30
    for unit, single, lasting in in_every_unit(shape):
        assert single[400].all(), unit
        assert not lasting.any(), unit
        assert single[401:450].mean() < 0.01, f"{unit}: the step after it is fine again"


@pytest.mark.parametrize("value", [0.0, 0.6931472, 3.0, -2.0, 1e-8])
def test_constant_losses(value):
    single, lasting = run(np.full((300, 1), value))
    assert not single.any()
    assert not lasting.any()
    nearly = np.full((300, 1), value)
    nearly[200:] *= 1.0001
    single, lasting = run(nearly)
    assert not lasting.any(), "a hundredth of a percent more"


def test_a_falling_loss_is_no_spike():
    t = np.arange(2000)[:, None]
    losses = 2 + 9 * np.exp(-t / 300) + 0.05 * noise(2000)
    single, lasting = run(losses)
    assert single.mean() < 2e-3
    assert not lasting.any()


def test_nan_and_inf_teach_nothing():
    losses = (2.5 + 0.05 * noise(500)).astype(np.float32)
    clean = run(losses)
    for wrong in (np.nan, np.inf, -np.inf):
        faulty = np.insert(losses, [5, 100, 100, 250], wrong, axis=0)
        keep = np.isfinite(faulty[:, 0])
        for a, b in zip(clean, run(faulty), strict=True):
            np.testing.assert_array_equal(a, b[keep])
            assert not b[~keep].any()


NORM_LANES = 100
KINDS = {
    "grad_spike": ("grad_norm", Cause.GRAD_SPIKE),
    "update_spike": ("update_norm", Cause.UPDATE_SPIKE),
}


def norms(steps: int, spread: float = 0.3) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(0).normal(size=(steps, NORM_LANES)))


def run_norms(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    single, lasting = run_norms(kind, scale * values)
    assert single[200].all()
    assert not np.delete(single, 200, axis=0).any()
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_small_shifts_are_none(kind):
    # Spread of lognormal norms, and how many steps of a thousand may pass for spikes.
    spreads = {0.0: 0, 1e-4: 0, 0.1: 0, 0.3: 0.2, 0.5: 3}
    values = np.concatenate([norms(1000, spread) for spread in spreads], axis=1)
    values[500:] *= 1.5
    single, lasting = run_norms(kind, values)
    by_spread = np.split(single, len(spreads), axis=1)
    for (spread, per_mille), found in zip(spreads.items(), by_spread, strict=True):
        assert 1000 * found.mean() <= per_mille, spread
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lasting_level_is_accepted(kind):
    values = norms(600, 0.1)
    values[200:] *= 30
    single, lasting = run_norms(kind, values)
    assert lasting[200:210].any(0).all()
    assert not single[280:].any(), "two windows"


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_non_numbers_teach_nothing(kind):
    values = norms(300)
    values[200] = 20
    clean = run_norms(kind, values)[0]
    for wrong in (0.0, np.nan, np.inf):
        faulty = np.insert(values, [3, 50, 50, 150], wrong, axis=0)
        keep = np.delete(np.arange(304), [3, 51, 52, 153])
        np.testing.assert_array_equal(run_norms(kind, faulty)[0][keep], clean)
