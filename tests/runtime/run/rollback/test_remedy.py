"""The table of remedies, as a pure function: each row, and what holds for every sequence."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.data import BatchId
from healcore.runtime.driver import NumberRange
from healcore.runtime.run.envelope import Envelope, Held
from healcore.runtime.run.rollback.remedy import (
    MAX_ACCEPTED,
    Facts,
    Outcome,
    RateFact,
    Remedy,
    remedy,
)
from healcore.runtime.run.trouble import RollbackRecord, Trouble, TroubleCause

UNUSUAL = Envelope(
    numbers={"momentum": Held(NumberRange(0.9, 0.9, 0.9), 1.2)},
    norms={"optimizer": 2.0},
    left_out=(BatchId(0, 41),),
)
FACTS = Facts(
    now=Envelope(),
    outside=Envelope(),
    snapshot=30,
    from_start=False,
    rate=RateFact.HEALTHY,
    lr_cuts=2,
    rollbacks_left=3,
    repeats_batches=True,
    accepted=0,
)
BETTER = Trouble(
    cause=TroubleCause.BETTER_WEIGHTS, onset=40, found_at=60, since=40, finite=True, better_step=30
)
NAN = Trouble(cause=TroubleCause.WEIGHTS, onset=40, found_at=60, since=40)


def tried(trouble: Trouble, chosen: Remedy, before: Envelope = FACTS.now) -> RollbackRecord:
    """A rollback by which this remedy was carried out."""
    return RollbackRecord(
        trouble=trouble,
        accepts=chosen.outcome is Outcome.ACCEPT,
        limits_rate=chosen.limits_rate,
        before=before,
        after=chosen.envelope,
        step=trouble.found_at + 1,
    )


def until_the_end(trouble: Trouble, facts: Facts) -> list[Remedy]:
    """The remedies of a trouble that comes back after each of them."""
    found: list[Remedy] = []
    tries: list[RollbackRecord] = []
    while not found or found[-1].outcome is Outcome.REPEAT:
        left = facts.rollbacks_left - len(tries)
        now = tries[-1].after if tries else facts.now
        cuts = facts.lr_cuts - sum(each.limits_rate for each in tries)
        then = facts._replace(now=now, rollbacks_left=left, lr_cuts=cuts)
        found.append(remedy(trouble, tries, then))
        tries.append(tried(trouble, found[-1], now))
    return found


@pytest.mark.parametrize("trouble", [BETTER, NAN], ids=["better weights", "NaN"])
def test_the_first_try_holds_what_has_left_its_range_and_nothing_else(trouble):
    assert remedy(trouble, [], FACTS) == Remedy(Outcome.REPEAT, Envelope())
    found = remedy(trouble, [], FACTS._replace(outside=UNUSUAL, rate=RateFact.HIGHER))
    assert found == Remedy(Outcome.REPEAT, UNUSUAL, limits_rate=True)


def test_the_second_try_freezes_from_the_earliest_onset_to_the_latest_evidence():
    first = tried(replace(BETTER, onset=44, found_at=70), Remedy(Outcome.REPEAT, UNUSUAL))
    found = remedy(BETTER, [first], FACTS._replace(now=UNUSUAL))
    assert found.outcome is Outcome.REPEAT
    assert found.envelope == replace(UNUSUAL, frozen=(32, 70))


def test_damage_that_came_back_although_nothing_was_held_is_of_the_program():
    outcomes = [each.outcome for each in until_the_end(BETTER, FACTS)]
    assert outcomes == [Outcome.REPEAT, Outcome.ACCEPT]
    dead = replace(BETTER, cause=TroubleCause.NO_FINITE_STEP)
    outcomes = [each.outcome for each in until_the_end(dead, FACTS)]
    assert outcomes == [Outcome.REPEAT, Outcome.REPEAT, Outcome.ACCEPT], "the snapshot was damaged"


def test_a_run_that_dies_at_several_steps_is_tried_at_a_lower_rate_before_it_is_accepted():
    dead = replace(BETTER, cause=TroubleCause.NO_FINITE_STEP)
    later = replace(dead, onset=70, found_at=90)
    tries = [tried(each, Remedy(Outcome.REPEAT, Envelope())) for each in (dead, dead, later)]
    rate = remedy(dead, tries, FACTS)
    assert (rate.outcome, rate.limits_rate) == (Outcome.REPEAT, True)
    assert remedy(dead, [*tries, tried(dead, rate)], FACTS).outcome is Outcome.ACCEPT


def test_weights_that_are_not_finite_end_with_a_quarter_of_the_rate_and_then_stop():
    found = until_the_end(NAN, FACTS)
    assert [each.outcome for each in found] == [Outcome.REPEAT] * 3 + [Outcome.STOP]
    assert [each.limits_rate for each in found] == [False, False, True, False]
    assert found[1].envelope.frozen is not None


def test_the_last_rollback_for_nan_limits_an_unknown_rate_also_where_later_steps_are_frozen():
    frozen = Remedy(Outcome.REPEAT, Envelope(frozen=(21, 38)))
    facts = FACTS._replace(rate=RateFact.UNKNOWN, snapshot=0, rollbacks_left=1)
    last = remedy(NAN, [tried(replace(NAN, onset=22, found_at=38), frozen)], facts)
    assert (last.outcome, last.limits_rate, last.is_last) == (Outcome.REPEAT, True, True)


def test_an_unknown_rate_is_limited_again_and_again_before_the_third_row():
    found = until_the_end(BETTER, FACTS._replace(rate=RateFact.UNKNOWN))
    assert [each.limits_rate for each in found] == [False, True, True, False]
    found = until_the_end(BETTER, FACTS._replace(from_start=True))
    assert [each.limits_rate for each in found][:2] == [True, True]
    assert found[0].envelope.is_guess


def test_a_rule_of_the_policy_is_followed_as_it_says():
    found = until_the_end(Trouble(onset=40, found_at=60, since=40), FACTS)
    assert [each.outcome for each in found] == [Outcome.REPEAT] * 3 + [Outcome.STOP]
    assert not any(each.envelope.frozen for each in found)
    assert [each.limits_rate for each in found] == [False, True, True, False]


def test_numbers_that_are_intended_and_many_accepted_changes_are_accepted_at_once():
    intended = replace(BETTER, cause=TroubleCause.INTENDED)
    first = tried(BETTER, Remedy(Outcome.REPEAT, UNUSUAL))
    assert remedy(intended, [first], FACTS) == Remedy(Outcome.ACCEPT, Envelope())
    many = FACTS._replace(accepted=MAX_ACCEPTED)
    assert remedy(BETTER, [], many).outcome is Outcome.ACCEPT


# -- properties ---------------------------------------------------------------------------------

envelopes = st.builds(
    Envelope,
    numbers=st.dictionaries(
        st.sampled_from(["momentum", "eps"]),
        st.just(Held(NumberRange(0.1, 0.2, 0.1), None)),
    ),
    norms=st.dictionaries(st.sampled_from(["", "critic"]), st.just(1.0)),
    left_out=st.lists(st.integers(0, 5).map(lambda each: BatchId(0, each)), unique=True).map(tuple),
    frozen=st.none() | st.just((3, 5)),
)
facts = st.builds(
    Facts,
    now=envelopes,
    outside=envelopes.map(lambda each: replace(each, frozen=None)),
    snapshot=st.integers(0, 40),
    from_start=st.booleans(),
    rate=st.sampled_from(RateFact),
    lr_cuts=st.integers(0, 4),
    rollbacks_left=st.integers(1, 5),
    repeats_batches=st.booleans(),
    accepted=st.integers(0, MAX_ACCEPTED),
)
troubles = st.builds(
    Trouble,
    cause=st.sampled_from(TroubleCause),
    onset=st.integers(40, 50),
    found_at=st.integers(50, 70),
    since=st.just(40),
    finite=st.booleans(),
)


@given(troubles, facts)
def test_every_trouble_has_a_bounded_number_of_tries(trouble, facts):
    found = until_the_end(trouble, facts)
    assert len(found) <= max(facts.lr_cuts + 3, facts.rollbacks_left) + 1
    assert found[-1].outcome is (Outcome.ACCEPT if trouble.finite else Outcome.STOP) or (
        trouble.cause is TroubleCause.INTENDED
    )


@given(troubles, facts)
def test_accepting_takes_back_all_that_the_tries_have_changed(trouble, facts):
    *tries, last = until_the_end(trouble, facts)
    if last.outcome is Outcome.ACCEPT and len(tries) < facts.rollbacks_left:
        assert last.envelope == facts.now


@given(st.lists(troubles, min_size=1, max_size=4), facts, st.data())
def test_the_order_of_the_causes_is_irrelevant(past, facts, data):
    """The same tries in another order, by whatever cause each was made, lead to the same answer."""
    *past, trouble = past
    chosen = Remedy(Outcome.REPEAT, facts.now.joined(facts.outside))
    tries = [tried(each, chosen, facts.now) for each in past]
    other = data.draw(st.permutations(tries))
    assert remedy(trouble, tries, facts) == remedy(trouble, other, facts)


@given(envelopes, envelopes)
def test_two_envelopes_are_joined_with_the_older_bounds(older, newer):
    both = older.joined(newer)
    assert both.numbers.keys() == older.numbers.keys() | newer.numbers.keys()
    assert {*both.left_out} == {*older.left_out, *newer.left_out}
    assert both.joined(newer) == both == older.joined(both.beyond(Envelope()))
    assert not both.beyond(both).numbers


def test_a_repeat_is_the_same_value_in_a_checkpoint():
    from pydantic import TypeAdapter

    kind: Any = TypeAdapter(RollbackRecord)
    record = tried(NAN, Remedy(Outcome.REPEAT, UNUSUAL))
    assert kind.validate_json(kind.dump_json(record), strict=True) == record
