"""Instability events: sustained spikes, not noise."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.tools.probe.loss_curve import Events, find_events
from tests.tools.probe.curves import probe_values, verdict_of

NOISES = {
    "gauss": lambda r, n: r.normal(size=n),
    "heavy tails": lambda r, n: r.standard_t(3, size=n),
    "skewed": lambda r, n: np.exp(0.8 * r.normal(size=n)),
    "one in ten": lambda r, n: np.where(r.random(n) < 0.1, 4.0, 0.0) + 0.5 * r.normal(size=n),
    "two kinds of batches": lambda r, n: np.where(r.random(n) < 0.05, 4.0, 0.0) + r.normal(size=n),
}


def events(values: np.ndarray, sigmas: float = 5.0) -> Events:
    return find_events(np.arange(len(values), dtype=float), values, sigmas, 36)


def base(steps: int, noise: str = "gauss", size: float = 0.02) -> np.ndarray:
    random = np.random.default_rng(2)
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4 + size * NOISES[noise](random, steps)


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_event(noise):
    assert events(base(5000, noise, 0.1)).events == ()


@pytest.mark.parametrize("length", [3, 5, 20, 60])
@pytest.mark.parametrize("noise", sorted(NOISES.keys() - {"one in ten"}))
def test_a_spike_that_lasts_is_one(noise, length):
    values = base(2000, noise)
    values[1200 : 1200 + length] += 3.0
    found = events(values)
    (event,) = found.events
    assert event.step == 1200
    assert event.back
    assert length - 2 <= event.values <= length + 2
    assert event.last == event.step + event.values - 1
    assert not found.unfinished
    assert events(values, sigmas=5000.0) == ((), 0, False)
    assert events(values[: 1200 + length]).unfinished


def test_one_high_value_is_a_jump_and_high_values_again_and_again_are_an_event(tmp_path):
    values = base(1000)
    values[[300, 500, 700]] += 3.0
    assert events(values) == ((), 3, False)
    values[[502, 506, 508]] += 3.0
    found = events(values)
    assert [(event.step, event.last) for event in found.events] == [(500, 508)]
    assert found.jumps == 2
    assert verdict_of(probe_values(tmp_path, values), "instability_events") == "WARN"
