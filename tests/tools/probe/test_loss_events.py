"""Instability events, by windows and by healcore's detector: sustained spikes, not noise."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.tools.probe.loss_curve import Event, detector_events, find_events, window_events
from tests.tools.probe.curves import probe_values, verdict_of

NOISES = {
    "gauss": lambda r, n: r.normal(size=n),
    "heavy tails": lambda r, n: r.standard_t(3, size=n),
    "skewed": lambda r, n: np.exp(0.8 * r.normal(size=n)),
    "one in ten": lambda r, n: np.where(r.random(n) < 0.1, 4.0, 0.0) + 0.5 * r.normal(size=n),
    "two kinds of batches": lambda r, n: np.where(r.random(n) < 0.05, 4.0, 0.0) + r.normal(size=n),
}


def by_windows(values: np.ndarray) -> tuple[list[Event], list[float], Event | None]:
    return window_events(np.arange(len(values), dtype=float), values, 5.0, 16)


def by_detector(values: np.ndarray, sigmas: float = 5.0) -> list[Event]:
    return detector_events(np.arange(len(values), dtype=float), values, sigmas)


def base(steps: int, seed: int) -> np.ndarray:
    noise = 0.02 * np.random.default_rng(seed).normal(size=steps)
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4 + noise


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_event(noise):
    random = np.random.default_rng(1)
    curves = [base(5000, 4) + 0.1 * NOISES[noise](random, 5000) for _ in range(2)]
    assert sum(len(by_windows(curve)[0]) for curve in curves) <= 1


@pytest.mark.parametrize("length", [5, 20, 80])
@pytest.mark.parametrize("noise", sorted(NOISES.keys() - {"one in ten"}))
def test_a_spike_that_lasts_is_one(noise, length):
    values = base(2000, 4) + 0.02 * NOISES[noise](np.random.default_rng(2), 2000)
    values[1200 : 1200 + length] += 3.0
    (event,), _, unfinished = by_windows(values)
    assert event.step == 1200
    assert event.back
    assert length - 2 <= event.values <= length + 2
    assert unfinished is None


@pytest.mark.parametrize("length", [3, 5, 20])
def test_the_detector_finds_one_event_in_a_spike(length):
    values = base(1000, 2)
    values[600 : 600 + length] += 3.0
    (event,) = by_detector(values)
    assert event.step == 600
    assert length - 1 <= event.values <= length + 1
    assert event.back
    assert event.last == event.step + event.values - 1
    assert by_detector(values, sigmas=5000.0) == []
    assert len(find_events(np.arange(1000.0), values, 5.0, 16).events) == 1


def test_one_high_value_is_a_jump_and_high_values_again_and_again_are_an_event(tmp_path):
    values = base(1000, 3)
    values[[300, 500, 700]] += 3.0
    assert by_windows(values) == ([], [300.0, 500.0, 700.0], None)
    values[[502, 506, 508]] += 3.0
    alone, jumps, _ = by_windows(values)
    assert not alone
    both = find_events(np.arange(1000.0), values, 5.0, 16)
    assert len(both.events) == 1
    assert both.jumps < len(jumps)
    assert verdict_of(probe_values(tmp_path, values), "instability_events") == "WARN"
