"""What healcore's own detector adds to the events of a curve."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.tools.probe.loss.events import Event
from healcore.tools.probe.loss.incidents import MOST, Incidents
from tests.probe.curves import probe_values, said
from tests.probe.test_events import NOISES, base, events


def incidents(values: np.ndarray, cut: int = 10**9, sigmas: float = 5.0) -> list[Event]:
    found = Incidents(sigmas, 3)
    steps = np.arange(len(values), dtype=float)
    for at in range(0, len(values), cut):
        found.add(steps[at : at + cut], values[at : at + cut])
    return found.finish()


@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_none(noise):
    random = np.random.default_rng(1)
    found = [incidents(base(5000) + 0.1 * NOISES[noise](random, 5000)) for _ in range(2)]
    assert found == [[], []]


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


def test_the_end_of_the_curve_within_one():
    values = base(600) + 0.02 * np.random.default_rng(3).normal(size=600)
    values[590:] += 3.0
    (event,) = incidents(values)
    assert (event.step, event.last, event.back) == (590, 599, False)


def test_of_a_long_curve_neighbours_are_judged_together():
    values = base(3 * MOST) + 0.02 * np.random.default_rng(4).normal(size=3 * MOST)
    values[40_000:40_060] += 3.0
    (event,) = incidents(values)
    assert abs(event.step - 40_000) <= 4
    assert 56 <= event.values <= 68


def test_what_both_find_is_one_event():
    values = base(1000) + 0.02 * np.random.default_rng(5).normal(size=1000)
    values[600:620] += 3.0
    found = events(values)
    found.include(incidents(values))
    assert found.count == len(found.found) == 1


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
    assert said(probe_values(tmp_path, values), "instability_events") == "WARN"
