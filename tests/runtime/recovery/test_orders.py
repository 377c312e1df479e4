"""The choice of the checkpoint and of the trial: pure functions, by hand and by an oracle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.recovery.orders import (
    ABOVE,
    MAX_LEFT_OUT,
    CheckpointChoice,
    Facts,
    Trial,
    choose,
    decide,
)
from healcore.runtime.store import NoGoodCheckpoint, Saved, Status


def saved(step: int, status: Status = "good", finite: bool = True) -> Saved:
    return Saved(step, status, finite, 1, 0.0, 1, None)


GOOD = [saved(0, "candidate"), saved(100), saved(200), saved(300), saved(400, "candidate")]


@pytest.mark.parametrize(
    ("onset", "depth", "order"),
    [
        (350, 1, (300, 200, 100)),
        (300, 1, (300, 200, 100)),  # saved before the step of the onset was taken
        (299, 1, (200, 100)),
        (1000, 1, (300, 200, 100)),  # a candidate is not known-good
        (350, 2, (200, 100)),
        (350, 3, (100,)),
        (350, 9, (100,)),  # as deep as it goes
        (350, 0, (300, 200, 100)),
    ],
)
def test_depth(onset, depth, order):
    assert choose(GOOD, onset=onset, depth=depth) == CheckpointChoice(order, False, False)


def test_the_second_rollback_for_the_same_trouble_restores_an_older_checkpoint():
    assert choose(GOOD, onset=360, tried=[300]).order == (200, 100)
    # What became good on the way back into the same trouble is not gone back to.
    later = [*GOOD, saved(340)]
    assert choose(later, onset=345, tried=[300], depth=1).order == (200, 100)
    assert choose(later, onset=345, tried=[300], depth=3).order == (200, 100)
    assert choose(later, onset=345, tried=[300], depth=4).order == (100,)


def test_a_missing_deeper_checkpoint_is_reported():
    found = choose(GOOD, onset=160, tried=[100])
    assert found == CheckpointChoice((100,), initial=False, repeated=True)
    found = choose(GOOD, onset=160, tried=[100], initial=[0])
    assert found == CheckpointChoice((0,), initial=True, repeated=False)
    found = choose(GOOD, onset=160, tried=[100, 0], initial=[0])
    assert found == CheckpointChoice((0,), initial=True, repeated=True)


def test_the_initial_snapshot_is_the_last_resort():
    assert choose(GOOD, onset=350, initial=[0]).order == (300, 200, 100, 0)
    assert choose(GOOD[:1], onset=5, initial=[0]) == CheckpointChoice((0,), True, False)
    with pytest.raises(NoGoodCheckpoint, match=r"onset at step 5.*there: 0 \(candidate\)"):
        choose(GOOD[:1], onset=5)
    with pytest.raises(NoGoodCheckpoint):
        choose([saved(0, "abandoned")], onset=5, initial=[0])
    with pytest.raises(NoGoodCheckpoint, match="not finite"):
        choose([saved(0, "candidate", finite=False)], onset=5, initial=[0])
    with pytest.raises(NoGoodCheckpoint, match="there: none"):
        choose([], onset=5, initial=[0])


def test_never_one_that_is_not_finite_or_abandoned():
    bad = [saved(0), saved(100, "abandoned"), saved(200, "good", finite=False)]
    assert choose(bad, onset=300, initial=[100]).order == (0,)


def test_healthy_steps_need_not_follow_without_a_gap():
    for unhealthy, step, now, expected in (
        ([], 10, 25, 15),
        ([9], 10, 30, 20),
        ([20], 20, 30, 9),  # the step right after the save of step 20
        ([*range(10, 21)], 10, 30, 9),
        ([30, 31], 20, 30, 10),  # not yet judged
    ):
        assert Ledger(unhealthy=unhealthy).healthy_steps(step, now) == expected


RATES = st.lists(st.sampled_from([0.0, 0.01, 0.1, 1.0]), max_size=3)
FACTS = st.builds(
    Facts,
    rates=RATES,
    healthy_rate=st.sampled_from([0.0, 0.01, 0.1]),
    from_start=st.booleans(),
    unusual=st.booleans(),
    numbers=st.booleans(),
    may_limit=st.integers(0, 4),
    can_rewind=st.booleans(),
)


def allowed(trial: Trial, tried: list[Trial], facts: Facts) -> bool:
    """The issue's words, one line for each trial."""
    if trial is Trial.RATE:
        above = any(rate > facts.healthy_rate * ABOVE for rate in facts.rates)
        above |= not facts.rates and bool(tried)
        return (above or facts.from_start) and tried.count(trial) < facts.may_limit
    if trial is Trial.LEAVE_OUT:
        return facts.unusual and facts.can_rewind and tried.count(trial) < MAX_LEFT_OUT
    if trial is Trial.NUMBERS:
        return facts.numbers and not facts.from_start and trial not in tried
    return {Trial.REPEAT: not tried, Trial.ACCEPT: True}[trial]


ORDER = (Trial.RATE, Trial.REPEAT, Trial.LEAVE_OUT, Trial.NUMBERS, Trial.ACCEPT)


@given(st.lists(st.sampled_from(ORDER[:-1]), max_size=6), FACTS)
def test_the_first_trial_in_order_that_is_allowed(tried, facts):
    assert decide(tried, facts) == next(e for e in ORDER if allowed(e, tried, facts))


@given(st.lists(FACTS, min_size=10, max_size=10))
def test_each_place_ends_with_an_acceptance(all_facts):
    """Whatever is measured at each of the verdicts: at most ten in one place."""
    tried: list[Trial] = []
    for facts in all_facts:
        tried.append(decide(tried, facts))
        if tried[-1] is Trial.ACCEPT:
            break
    assert tried[-1] is Trial.ACCEPT
    assert max(tried.count(Trial.REPEAT), tried.count(Trial.NUMBERS)) <= 1


def test_a_rate_that_the_run_was_healthy_at_is_not_limited():
    facts = Facts([0.1, 0.1], 0.1, False, False, False, 4, True)
    assert decide([], facts) is Trial.REPEAT
    assert decide([Trial.REPEAT], facts) is Trial.ACCEPT
