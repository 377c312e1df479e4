"""Which steps may have caused some trouble, when it began, and which norms were healthy."""

import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.witness.evidence import Anchor, TrainedStep
from healcore.runtime.run.witness.recent_steps import (
    MAX_KEPT,
    REGULAR_INTERVAL,
    STEPS_AFTER_SIGN,
    STEPS_BEFORE_SIGN,
    RecentSteps,
    Signs,
)
from tests.runtime.run.witness.toy_driver import ToyRun, noisy


@pytest.fixture
def recent() -> RecentSteps:
    return ToyRun(noisy).witness.recent


def add(
    recent: RecentSteps,
    losses: Iterable[float],
    first: int = 0,
    norm: float = 1.0,
    *,
    alarm: bool = False,
) -> list[Signs]:
    found = []
    for index, loss in enumerate(losses, first):
        found.append(recent.add(TrainedStep(index, (), {"a": norm}), loss, alarm=alarm))
    return found


def test_each_loss_of_a_burst_is_high_and_only_the_first_is_a_record(recent):
    add(recent, [1.0] * 150)
    signs = add(recent, [5.0] * 30, first=150)
    assert [each.high for each in signs] == [True] * 30
    assert [each.sign for each in signs] == [True] + [False] * 29
    assert [index for index, each in enumerate(signs) if each.is_urgent] == [STEPS_AFTER_SIGN]


def test_high_losses_do_not_become_usual_until_a_comparison_shows_no_damage(recent):
    add(recent, [1.0] * 150)
    assert all(each.high for each in add(recent, [5.0] * 500, first=150))
    recent.accept()
    assert not any(each.high for each in add(recent, [5.0] * 100, first=650))
    assert add(recent, [6.0], first=750)[0].high


def test_a_few_high_losses_are_not_a_new_level(recent):
    add(recent, [1.0] * 150)
    add(recent, [5.0] * 30, first=150)
    recent.accept()
    assert add(recent, [5.0], first=180)[0].high


def test_losses_that_are_not_finite_are_never_the_usual_level(recent):
    """A shard of bad data, after which the healthy losses would all be high."""
    add(recent, [1.0] * 150)
    add(recent, [math.nan] * 150, first=150, alarm=True)
    recent.accept()
    assert not any(each.high for each in add(recent, [1.0] * 50, first=300))


@given(st.integers(0, 2**32))
def test_a_loss_is_high_above_the_last_usual_losses(seed):
    """An oracle of `high` that remembers all losses; many of them are equal."""
    numbers = random.Random(seed)
    losses = [round(numbers.gauss(0.0, 3.0) - index / 100) for index in range(350)]
    recent = ToyRun(noisy).witness.recent
    usual: list[float] = []
    for index, loss in enumerate(losses):
        newest = usual[-REGULAR_INTERVAL:]
        high = len(newest) == REGULAR_INTERVAL and loss > max(newest)
        (found,) = add(recent, [loss], first=index, norm=math.nan)
        assert found.high == high
        if not high:
            usual.append(loss)


# -- suspect steps ---------------------------------------------------------------------------------


def test_suspects_are_the_steps_around_the_first_sign_and_all_later_high_ones(recent):
    add(recent, [1.0] * 150)
    add(recent, [5.0] * 30, first=150)
    add(recent, [1.0] * 30, first=180)
    add(recent, [1.0], first=210, norm=8.0)
    found = recent.suspect_steps(150, 220)
    indices = [step.index for step in found]
    before = range(210 - STEPS_BEFORE_SIGN, 210)
    assert indices == [*range(150 - STEPS_BEFORE_SIGN, 180), *before, 210]


def test_the_first_steps_of_a_long_burst_stay_and_an_earlier_burst_makes_room(recent):
    """The bad batches come first. Later, damaged weights have high losses on good batches, too."""
    add(recent, [1.0] * 150)
    add(recent, [5.0] * 10, first=150)
    add(recent, [1.0] * 40, first=160)
    add(recent, [6.0] * 300, first=200)
    found = recent.suspect_steps(200, 500)
    assert [each.index for each in found] == [*range(192, 192 + MAX_KEPT)]


def test_suspects_are_looked_for_from_the_alarm_on_that_began_the_trouble(recent):
    for index in range(100):
        add(recent, [1.0], first=index, alarm=index in (10, 60))

    def first_of(onset: int, last: int) -> int:
        return recent.suspect_steps(onset, last)[0].index

    assert first_of(12, 99) == 10 - STEPS_BEFORE_SIGN
    assert first_of(61, 99) == 60 - STEPS_BEFORE_SIGN
    assert first_of(55, 50) == 10 - STEPS_BEFORE_SIGN, "the steps end before the second alarm"


# -- norms and rates -------------------------------------------------------------------------------


def test_the_norms_of_the_bad_steps_before_the_first_sign_are_not_healthy(recent):
    """A gradient x 4096 shows in the loss only some steps later."""
    add(recent, [1.0] * 150)
    add(recent, [1.0] * 4, first=150, norm=4096.0)
    assert recent.healthy.norms == {"a": 1.0}
    add(recent, [9.0], first=154, alarm=True)
    found = recent.suspect_steps(154, 160)
    assert max(step.norms["a"] for step in found) == 4096.0


def test_a_norm_without_trouble_after_it_becomes_healthy(recent):
    add(recent, [1.0] * 150)
    add(recent, [1.0], first=150, norm=2.0)
    add(recent, [1.0] * 19, first=151)
    assert recent.healthy.norms == {"a": 1.0}
    add(recent, [1.0], first=170)
    assert recent.healthy.norms == {"a": 2.0}


def test_norms_while_evidence_is_pending_and_norms_that_are_not_finite_are_not_healthy(recent):
    add(recent, [1.0] * 150)
    recent.run.record.comparisons.anchors.append(Anchor(0, evidence=2.0))
    add(recent, [1.0] * 50, first=150, norm=7.0)
    recent.run.record.comparisons.anchors.clear()
    add(recent, [1.0] * 50, first=200, norm=math.inf)
    add(recent, [1.0] * 50, first=250)
    assert recent.healthy.norms == {"a": 1.0}


def test_a_norm_above_a_limit_in_force_never_becomes_healthy(recent):
    add(recent, [1.0] * 100)
    recent.run.record.envelope = Envelope(norms={"a": 3.0})
    add(recent, [1.0] * 100, first=100, norm=4096.0)
    add(recent, [1.0] * 100, first=200, norm=2.5)
    assert recent.healthy.norms == {"a": 2.5}


def test_a_limit_follows_norms_that_all_exceed_it(recent):
    add(recent, [1.0] * 19, norm=2.0)
    assert recent.lowest_norms() == {}
    add(recent, [1.0], first=19, norm=4096.0)
    assert recent.lowest_norms() == {"a": 2.0}
    add(recent, [1.0] * 20, first=20, norm=4.0)
    assert recent.lowest_norms() == {"a": 4.0}


def test_the_rates_of_all_healthy_steps_are_learnt_and_not_those_shortly_before(recent):
    """A schedule restarts between two checkpoints. A raised rate comes before its alarm."""

    def add_rates(steps: range, rate: float) -> None:
        for index in steps:
            recent.add(TrainedStep(index, (), {}, {"a": rate}), 1.0, alarm=False)

    add_rates(range(30), 0.1)
    add_rates(range(30, 95), 0.05)
    add_rates(range(95, 99), 3.0)
    add_rates(range(99, 100), 0.01)
    low, high, *_ = recent.healthy.rates["a"]
    assert (low, high) == (0.05, 0.1)
