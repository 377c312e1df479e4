"""Divergence: a trend that leaves its best level for good. Noise is none, nor instability."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from healcore.core.verdict import Cause
from tests.core.engine_runner import Runner, alarms, watching

LANES = 50


def noise(steps: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def run(losses: np.ndarray, name: str = "divergence", norms: Any = 1.0) -> np.ndarray:
    losses = np.asarray(losses, np.float32)
    norms = np.broadcast_to(np.asarray(norms, np.float32), losses.shape)
    runner = Runner(watching(name), lanes=losses.shape[1])
    return alarms(runner.feed(loss=losses, grad_norm=norms), Cause[name.upper()])


BOTH = pytest.mark.parametrize("name", ["divergence", "instability"])


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.0])
def test_a_noisy_ramp_from_2_to_22_is_found(spread):
    """A published rule waits for fifty rises in a row and never finds it."""
    losses = 2 + spread * noise(1300)
    losses[300:] += np.linspace(0, 20, 1000)[:, None]
    found = run(losses)
    assert not found[:300].any()
    assert found[300:1000].any(0).all()


@pytest.mark.parametrize(
    ("times", "noise_share"), [(3.0, 0.05), (3.0, 0.15), (10.0, 0.3), (30.0, 0.3)]
)
def test_noise_proportional_to_the_level_hides_no_rise(times, noise_share):
    """The noise rises with the loss: measured in the noise of now, no such rise is high."""
    level = np.concatenate([np.full(400, 2.0), 2.0 * np.geomspace(1, times, 600)])
    losses = level[:, None] * np.exp(noise_share * noise(1000))
    found = run(losses)
    assert not found[:400].any()
    assert found[400:].any(0).all()


def test_noise_proportional_to_the_level_does_not_diverge():
    shares = [0.05, 0.15, 0.3, 0.5]
    levels = np.linspace(8.0, 1.0, 3000)[:, None], np.full((3000, 1), 2.0)
    losses = [level * np.exp(share * noise(3000)) for share in shares for level in levels]
    assert not run(np.concatenate(losses, axis=1)).any()


@BOTH
def test_noise_is_none(name):
    kinds = list(itertools.product([2.0, 0.0, -3.0], [1e-4, 0.1, 1.0]))
    losses = np.concatenate([o + spread * noise(2000) for o, spread in kinds], axis=1)
    found = run(losses, name, np.tile(np.exp(noise(2000, 2)), len(kinds)))
    wrong = [
        kind for kind, of in zip(kinds, np.split(found, len(kinds), 1), strict=True) if of.any()
    ]
    assert not wrong, "offset, spread"


def test_a_spike_that_heals_is_no_divergence():
    losses = 2.5 + 0.05 * noise(1000)
    losses[500:530] += 5 * np.exp(-np.arange(30) / 8)[:, None]
    assert not run(losses).any()


@BOTH
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_a_constant_loss_is_none(name, value):
    losses = np.full((600, 1), value)
    losses[400:] *= 1.0001
    assert not run(losses, name, np.geomspace(1, 1e6, 600)[:, None]).any()


def test_nan_steps_neither_raise_nor_end_the_alarm():
    losses = 2 + 0.1 * noise(900)
    losses[200:] += np.linspace(0, 20, 700)[:, None]
    clean = run(losses)
    faulty = np.insert(losses, range(1, 900), np.nan, axis=0)
    found = run(faulty)
    assert not found[1::2].any()
    np.testing.assert_array_equal(found[::2], clean)
