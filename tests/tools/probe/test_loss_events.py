"""Instability events, by windows and by healcore's detector: sustained spikes, not noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.tools.probe.loss_events import (
    MAX_VALUES,
    DetectorEventFinder,
    Event,
    WindowEventFinder,
)
from tests.tools.probe.curves import probe_values, verdict_of

NOISES = {
    "gauss": lambda r, n: r.normal(size=n),
    "heavy tails": lambda r, n: r.standard_t(3, size=n),
    "skewed": lambda r, n: np.exp(0.8 * r.normal(size=n)),
    "one in ten": lambda r, n: np.where(r.random(n) < 0.1, 4.0, 0.0) + 0.5 * r.normal(size=n),
    "two kinds of batches": lambda r, n: np.where(r.random(n) < 0.05, 4.0, 0.0) + r.normal(size=n),
}


def events(values: np.ndarray, cut: int = 10**9) -> WindowEventFinder:
    found = WindowEventFinder(5.0, 3)
    steps = np.arange(len(values), dtype=float)
    for at in range(0, len(values), cut):
        found.add(steps[at : at + cut], values[at : at + cut])
    found.finish()
    return found


def base(steps: int) -> np.ndarray:
    return 1 + 9 * (1 + np.arange(steps) / 5) ** -0.4


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_event(noise):
    random = np.random.default_rng(1)
    counts = [events(base(5000) + 0.1 * NOISES[noise](random, 5000)).count for _ in range(2)]
    assert sum(counts) <= 1


@pytest.mark.parametrize("length", [5, 20, 80])
@pytest.mark.parametrize("noise", sorted(NOISES.keys() - {"one in ten"}))
def test_a_spike_that_lasts_is_one(noise, length):
    random = np.random.default_rng(2)
    values = base(2000) + 0.02 * NOISES[noise](random, 2000)
    values[1200 : 1200 + length] += 3.0
    found = events(values)
    assert found.count == 1
    (event,) = found.events
    assert event.step == 1200
    assert event.back
    assert length - 2 <= event.values <= length + 2
    assert found.unfinished is None


def test_one_high_value_is_a_jump():
    values = base(1000) + 0.02 * np.random.default_rng(3).normal(size=1000)
    values[[300, 500, 700]] += 3.0
    found = events(values)
    assert found.count == 0
    assert found.jumps == 3


def test_the_end_of_the_curve_within_one():
    values = base(1000) + 0.02 * np.random.default_rng(4).normal(size=1000)
    values[-12:] += 3.0
    found = events(values)
    assert found.count == 1
    assert found.unfinished is not None
    assert found.unfinished.step == 988


def test_a_new_level_is_one_event_and_not_many():
    values = base(3000) + 0.02 * np.random.default_rng(5).normal(size=3000)
    values[1000:] += 3.0
    found = events(values)
    assert found.count == 1
    assert not found.events[0].back
    assert found.unfinished is None


def test_every_value_is_judged_however_the_chunks_are_cut():
    quiet = base(1000) + 0.02 * np.random.default_rng(6).normal(size=1000)
    for onset in range(380, 680, 11):
        values = quiet.copy()
        values[onset : onset + 10] += 3.0
        for cut in (100, 129):
            assert [event.step for event in events(values, cut).events] == [onset]


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 700), st.integers(1, 1500))
def test_chunks_do_not_matter(seed, cut, steps):
    random = np.random.default_rng(seed)
    values = base(steps) + 0.1 * random.standard_t(2, size=steps)
    for onset in random.integers(0, steps, 4):
        values[onset : onset + random.integers(1, 300)] += random.exponential(2.0)
    whole, pieces = events(values), events(values, cut)
    assert whole.events == pieces.events
    assert (whole.count, whole.jumps) == (pieces.count, pieces.jumps)
    assert whole.unfinished == pieces.unfinished


# -- by healcore's own detector --------------------------------------------------------------------


def incidents(values: np.ndarray, cut: int = 10**9, sigmas: float = 5.0) -> list[Event]:
    found = DetectorEventFinder(sigmas, 3)
    steps = np.arange(len(values), dtype=float)
    for at in range(0, len(values), cut):
        found.add(steps[at : at + cut], values[at : at + cut])
    return found.finish()


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_no_incident(noise):
    random = np.random.default_rng(1)
    found = [incidents(base(5000) + 0.1 * NOISES[noise](random, 5000)) for _ in range(1)]
    assert found == [[]]


@pytest.mark.parametrize("length", [3, 5, 20])
def test_a_spike_is_one_wherever_the_chunks_are_cut(length):
    values = base(1000) + 0.02 * np.random.default_rng(2).normal(size=1000)
    values[600 : 600 + length] += 3.0
    (event,) = incidents(values)
    assert event.step == 600
    assert length - 1 <= event.values <= length + 1
    assert event.back
    assert event.last == event.step + event.values - 1
    assert incidents(values, cut=7) == [event]
    assert incidents(values, sigmas=5000.0) == []


def test_the_end_of_the_curve_within_an_incident():
    values = base(600) + 0.02 * np.random.default_rng(3).normal(size=600)
    values[590:] += 3.0
    (event,) = incidents(values)
    assert (event.step, event.last, event.back) == (590, 599, False)


def test_neighbours_of_a_long_curve_are_judged_together():
    values = base(3 * MAX_VALUES) + 0.02 * np.random.default_rng(4).normal(size=3 * MAX_VALUES)
    values[40_000:40_060] += 3.0
    (event,) = incidents(values)
    assert abs(event.step - 40_000) <= 4
    assert 56 <= event.values <= 68


def test_an_event_found_by_both_is_one_event():
    values = base(1000) + 0.02 * np.random.default_rng(5).normal(size=1000)
    values[600:620] += 3.0
    found = events(values)
    found.include(incidents(values))
    assert found.count == len(found.events) == 1


def test_high_values_again_and_again_are_an_event_and_no_single_ones(tmp_path):
    values = base(400) + 0.02 * np.random.default_rng(6).normal(size=400)
    values[[300, 302, 306, 308]] += 3.0
    values[200] += 3.0
    alone = events(values)
    alone_before = alone.jumps
    assert alone.count == 0
    alone.include(incidents(values))
    assert alone.count == 1
    assert alone.jumps < alone_before
    assert verdict_of(probe_values(tmp_path, values), "instability_events") == "WARN"
