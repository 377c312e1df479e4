"""What is tried after a verdict: against an oracle of three lines, and as a whole history."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.recovery.orders import ABOVE, MAX_LEFT_OUT, Facts, Trial, decide

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
