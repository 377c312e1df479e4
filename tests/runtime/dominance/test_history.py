"""Means, and the steps around signs of trouble."""

from __future__ import annotations

import math
import statistics

from healcore.runtime.dominance.anchor import TrainedStep
from healcore.runtime.dominance.history import AFTER, BEFORE, HEARTBEAT, RECENT, History, Seen


def add(history: History, index: int, *, loss: float = 1.0, norm: float = 1.0, sign: bool = False):
    return history.add(Seen(TrainedStep(index, ()), loss, norm), sign=sign, healthy=True)


def test_a_window_holds_the_steps_around_the_first_sign():
    history = History()
    for index in range(200):
        first = add(history, index, norm=9.0 if index == 102 else 1.0, sign=100 <= index < 150)
        assert first == (index == 100), "the trouble goes on"
    window = history.window(onset=110, found=190)
    assert window is not None
    assert [each.step.index for each in window.steps] == [*range(100 - BEFORE, 100 + AFTER)]
    assert window.norms_above() == {102}
    assert history.window(onset=0, found=99) is None


def test_the_nearest_window_counts_and_memory_is_bounded():
    history = History()
    for index in range(1000):
        add(history, index, sign=index % 100 == 0)
    window = history.window(onset=880, found=999)
    assert window is not None
    assert window.start == 900
    assert len(history._windows) <= 4
    assert sum(len(each.steps) for each in history._windows) <= 4 * (BEFORE + AFTER)


def test_the_level_and_a_high_loss():
    history = History()
    for index in range(HEARTBEAT):
        assert not history.is_high(9.0), "nothing is known yet"
        add(history, index, loss=index % 7)
        if index < RECENT - 1:
            assert history.level() is None
    last = [index % 7 for index in range(HEARTBEAT - RECENT, HEARTBEAT)]
    assert history.level() == (statistics.fmean(last), statistics.stdev(last))
    assert history.is_high(6.5)
    assert not history.is_high(6.0)
    add(history, HEARTBEAT, loss=math.nan)
    assert history.level() == (statistics.fmean(last), statistics.stdev(last))


def test_without_a_healthy_norm_no_norm_is_unusual():
    history = History()
    add(history, 0, norm=math.inf, sign=True)
    add(history, 1, norm=math.nan)
    window = history.window(0, 1)
    assert window is not None
    assert window.norms_above() == set()
