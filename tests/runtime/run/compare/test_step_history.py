"""Which steps may have caused some trouble, when it began, and which norms were healthy."""

import math
import random
from collections.abc import Iterable, Mapping

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.compare.credit import REGULAR_INTERVAL
from healcore.runtime.run.compare.step_history import (
    MAX_ALWAYS,
    MAX_BYTES,
    MAX_HIGH_STEPS,
    STEPS_BEFORE_SIGN,
    Signs,
    StepHistory,
)
from healcore.runtime.run.compare.trained_step import ObservedBatch, TrainedStep


def add(
    history: StepHistory,
    losses: Iterable[float],
    first: int = 0,
    norm: float = 1.0,
    limits: Mapping[str, float] | None = None,
    *,
    alarm: bool = False,
    healthy: bool = True,
) -> list[Signs]:
    found = []
    for index, loss in enumerate(losses, first):
        step = TrainedStep(index, (), {"a": norm})
        signs = history.add(step, loss, alarm=alarm, healthy=healthy, norm_limits=limits or {})
        found.append(signs)
    return found


def falling(steps: int) -> list[float]:
    return [10 / (1 + step / 20) for step in range(steps)]


def test_each_loss_of_a_burst_is_high_and_only_the_first_is_a_record():
    history = StepHistory()
    add(history, [1.0] * 150)
    signs = add(history, [5.0] * 30, first=150)
    assert [each.high for each in signs] == [True] * 30
    assert [each.sign for each in signs] == [True] + [False] * 29


def test_high_losses_do_not_become_usual_until_a_comparison_shows_no_damage():
    history = StepHistory()
    add(history, [1.0] * 150)
    assert all(each.high for each in add(history, [5.0] * 500, first=150))
    history.level.accept()
    assert not any(each.high for each in add(history, [5.0] * 50, first=650))
    history.level.accept()
    assert add(history, [6.0], first=700)[0].high


def test_a_few_high_losses_are_not_a_new_level():
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [5.0] * 30, first=150)
    history.level.accept()
    assert add(history, [5.0], first=180)[0].high


def test_losses_that_are_not_finite_are_never_the_usual_level():
    """A shard of bad data, after which the healthy losses would all be high."""
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [math.nan] * 150, first=150, alarm=True)
    history.level.accept()
    assert history.level.largest_usual() == 1.0
    signs = add(history, [1.0] * 50, first=300)
    assert [each.high for each in signs] == [True] + [False] * 49  # the first ends the stretch


def test_the_norms_of_the_bad_steps_before_the_first_sign_are_not_healthy():
    """A gradient x 4096 shows in the loss only some steps later."""
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [1.0] * 4, first=150, norm=4096.0)
    assert history.norms.largest() == {"a": 1.0}
    add(history, [9.0], first=154, alarm=True)
    found = history.suspect_steps(154, 160)
    assert found is not None
    assert found.largest_norms() == {"a": 4096.0}
    add(history, [1.0] * 200, first=155)
    assert history.norms.largest() == {"a": 1.0}, "a sign came in time, so they never are"


def test_a_norm_without_a_sign_after_it_becomes_healthy():
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [1.0], first=150, norm=2.0)
    add(history, [1.0] * 19, first=151)
    assert history.norms.largest() == {"a": 1.0}
    add(history, [1.0], first=170)
    assert history.norms.largest() == {"a": 2.0}


def test_norms_while_evidence_is_pending_and_norms_that_are_not_finite_are_not_healthy():
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [1.0] * 50, first=150, norm=7.0, healthy=False)
    add(history, [1.0] * 50, first=200, norm=math.inf)
    add(history, [1.0] * 50, first=250)
    assert history.norms.largest() == {"a": 1.0}


def test_suspects_are_the_steps_around_the_first_sign_and_all_later_high_ones():
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [5.0] * 30, first=150)
    add(history, [1.0] * 30, first=180)
    add(history, [1.0], first=210, norm=8.0)
    found = history.suspect_steps(150, 220)
    assert found is not None
    indices = [step.index for step in found.steps]
    assert indices == [*range(150 - STEPS_BEFORE_SIGN, 180), 210]
    assert found.start == 150


def test_suspects_are_bounded():
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [5.0] * 1000, first=150)
    found = history.suspect_steps(150, 1150)
    assert found is not None
    assert len(found.steps) == STEPS_BEFORE_SIGN + MAX_HIGH_STEPS
    assert found.steps[-1].index == 150 + MAX_HIGH_STEPS - 1


def test_the_first_steps_of_a_long_burst_stay_and_an_earlier_burst_makes_room():
    """The bad batches come first. Later, damaged weights have high losses on good batches, too."""
    history = StepHistory()
    add(history, [1.0] * 150)
    add(history, [5.0] * 10, first=150)
    add(history, [1.0] * 40, first=160)
    add(history, [6.0] * 300, first=200)
    found = history.suspect_steps(200, 500)
    assert found is not None
    indices = [each.index for each in found.steps]
    assert indices == [*range(192, 200 + MAX_HIGH_STEPS)]


@pytest.mark.parametrize(
    ("content", "later"),
    [
        pytest.param({"x": [numpy.empty(MAX_BYTES // 10, numpy.uint8)]}, 10, id="arrays"),
        pytest.param(object(), 0, id="an unknown type"),
        pytest.param({"graph": torch.eye(3).to_sparse()}, 0, id="a sparse tensor"),
        pytest.param(["text", 1.0, None], MAX_HIGH_STEPS - MAX_ALWAYS, id="small values"),
    ],
)
def test_the_batches_of_late_steps_take_a_bounded_memory(content: object, later: int):
    history = StepHistory()
    add(history, [1.0] * 150)
    for index in range(150, 650):
        step = TrainedStep(index, (ObservedBatch(content),), {"a": 1.0})
        history.add(step, 5.0, alarm=False, healthy=True, norm_limits={})
    found = history.suspect_steps(150, 650)
    assert found is not None
    assert len(found.steps) == STEPS_BEFORE_SIGN + MAX_ALWAYS + later


@given(st.integers(0, 2**32))
def test_the_cached_maxima_are_the_maxima(seed):
    """An oracle of `sign` and `high` that remembers all losses; many of them are equal."""
    numbers = random.Random(seed)
    losses = [round(numbers.gauss(0.0, 3.0) - index / 100) for index in range(350)]
    history = StepHistory()
    usual: list[float] = []
    for index, loss in enumerate(losses):
        last = losses[max(0, index - REGULAR_INTERVAL) : index]
        sign = len(last) == REGULAR_INTERVAL and loss > max(last)
        newest = usual[-REGULAR_INTERVAL:]
        high = sign or (len(newest) == REGULAR_INTERVAL and loss > max(newest))
        (found,) = add(history, [loss], first=index, norm=math.nan)
        assert (found.sign, found.high) == (sign, high)
        if not high:
            usual.append(loss)


def test_a_norm_above_a_limit_in_force_never_becomes_healthy():
    history = StepHistory()
    add(history, [1.0] * 100)
    limits = {"a": 3.0}
    add(history, [1.0] * 100, first=100, norm=4096.0, limits=limits)
    add(history, [1.0] * 100, first=200, norm=2.5, limits=limits)
    history.norms.learn_doubtful(300, limits)
    assert history.norms.largest() == {"a": 2.5}


def test_the_typical_norm_is_the_median_of_the_last_norms():
    history = StepHistory()
    add(history, [1.0] * 99, norm=2.0)
    assert history.norms.typical() == {}
    add(history, [1.0] * 60, first=99, norm=4.0)
    assert history.norms.typical() == {"a": 4.0}
    add(history, [1.0] * 2, first=159, norm=4096.0)
    assert history.norms.typical() == {"a": 4.0}


def test_a_rollback_takes_back_the_norms_that_were_learnt_after_its_target():
    history = StepHistory()
    add(history, [1.0] * 100)
    at_target = history.norms.largest()
    add(history, [1.0] * 60, first=100, norm=8.0)
    assert history.norms.largest() == {"a": 8.0}
    history.forget(at_target)
    assert history.norms.largest() == {"a": 1.0}


def test_a_loss_that_was_high_before_a_rollback_is_high_in_the_repeat():
    """Without it, only the first bad batches of a repeat would be found, and not the others."""
    history = StepHistory()
    add(history, [1.0] * 150)
    at_target = history.level.largest_usual()
    add(history, [5.0] * 30, first=150)
    history.forget({}, at_target)
    add(history, [1.0] * 10, first=150)
    signs = add(history, [5.0] * 30, first=160)
    assert [each.high for each in signs] == [True] * 30
    assert [each.sign for each in signs] == [True] + [False] * 29
    add(history, [0.5] * 100, first=190)
    assert add(history, [1.0], first=290)[0].high, "the losses of the repeat are the usual ones"


def test_few_losses_say_nothing_about_the_usual_loss():
    history = StepHistory()
    add(history, [1.0] * 99)
    assert history.level.largest_usual() is None


def test_the_rates_of_all_healthy_steps_are_learnt_and_not_those_at_a_sign():
    """A schedule restarts between two checkpoints. A raised rate comes before its alarm."""
    history = StepHistory()

    def add(steps: range, rate: float, *, alarm: bool = False) -> None:
        for index in steps:
            step = TrainedStep(index, (), {}, {"a": rate})
            history.add(step, 1.0, alarm=alarm, healthy=True, norm_limits={})

    add(range(30), 0.1)
    add(range(30, 95), 0.05)
    add(range(95, 99), 3.0)
    add(range(99, 100), 0.01, alarm=True)
    assert history.norms.take_rates({"a": 0.01}) == {"a": NumberRange(0.01, 0.1, 0.01)}
    assert history.norms.take_rates({"a": 0.02}) == {"a": NumberRange(0.02, 0.02, 0.02)}
    assert history.norms.take_rates({}) == {}


def test_suspects_are_looked_for_from_the_alarm_on_that_began_the_trouble():
    history = StepHistory()
    for index in range(100):
        add(history, [1.0], first=index, alarm=index in (10, 60))

    def start_of(onset: int, last: int) -> int:
        suspects = history.suspect_steps(onset, last)
        assert suspects is not None
        return suspects.start

    assert start_of(12, 99) == 10
    assert start_of(61, 99) == 60
    assert start_of(55, 50) == 10, "the steps end before the second alarm"
