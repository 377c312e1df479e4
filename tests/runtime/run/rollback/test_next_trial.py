"""What changes when the steps after a rollback are repeated."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.run.healthy_ranges import RATE_TOLERANCE
from healcore.runtime.run.rollback.next_trial import MAX_HOLDS, Trial, TroubleFacts, next_trial

ENGINES = ("a", "b")
RATES = st.dictionaries(
    st.sampled_from(ENGINES), st.sampled_from([0.0, 0.01, 0.1, 1.0]), min_size=1
)
FACTS = st.builds(
    TroubleFacts,
    rates=st.lists(RATES, max_size=3),
    healthy_rates=RATES,
    from_start=st.booleans(),
    unusual=st.booleans(),
    repeats_batches=st.booleans(),
    max_rate_limits=st.integers(0, 4),
)
EARLIER_TRIALS = st.lists(
    st.sampled_from([trial for trial in Trial if trial is not Trial.ACCEPT]), max_size=6
)
"""Any trials at the same trouble. `ACCEPT` is the last one, and nothing follows it."""


def any_rate_is_higher(facts: TroubleFacts) -> bool:
    """Whether a rate at the trouble was above the highest healthy rate of its engine."""
    for rates in facts.rates:
        for engine, rate in rates.items():
            healthy = facts.healthy_rates.get(engine, 0.0)
            if rate > healthy * RATE_TOLERANCE:
                return True
    return False


def expected_trial(tried: Sequence[Trial], facts: TroubleFacts) -> Trial:
    """An oracle of `next_trial`, written independently."""
    limits_left = tried.count(Trial.LIMIT_RATE) < facts.max_rate_limits
    holds_left = tried.count(Trial.HOLD) < MAX_HOLDS
    if limits_left and (any_rate_is_higher(facts) or facts.from_start):
        return Trial.LIMIT_RATE
    if not tried:
        return Trial.REPEAT
    held_in_vain = Trial.HOLD in tried
    if holds_left and (facts.unusual or (held_in_vain and facts.repeats_batches)):
        return Trial.HOLD
    if limits_left and not facts.rates:
        return Trial.LIMIT_RATE
    return Trial.ACCEPT


@given(EARLIER_TRIALS, FACTS)
def test_the_trial_follows_from_the_facts_and_the_earlier_trials(tried, facts):
    assert next_trial(tried, facts) == expected_trial(tried, facts)


def test_what_is_unusual_is_held_before_an_unknown_rate_is_limited():
    """A limit lasts, and cannot cure a gradient times 4096. Plain optax hides its rates."""
    facts = TroubleFacts(
        rates=(),
        healthy_rates={},
        from_start=False,
        unusual=True,
        repeats_batches=True,
        max_rate_limits=4,
    )
    tried: list[Trial] = []
    while Trial.ACCEPT not in tried:
        tried.append(next_trial(tried, facts))
    limits = [Trial.LIMIT_RATE] * facts.max_rate_limits
    assert tried == [Trial.REPEAT, Trial.HOLD, Trial.HOLD, *limits, Trial.ACCEPT]


def test_after_a_hold_that_did_not_help_the_steps_are_frozen_although_nothing_else_is_unusual():
    """Gradients of a forgotten `zero_grad` have a large norm, which is held in vain."""
    facts = TroubleFacts(
        rates=[{"a": 0.1}],
        healthy_rates={"a": 0.1},
        from_start=False,
        unusual=False,
        repeats_batches=True,
        max_rate_limits=2,
    )
    assert next_trial([Trial.REPEAT], facts) == Trial.ACCEPT
    on_other_batches = facts._replace(repeats_batches=False)
    assert next_trial([Trial.REPEAT, Trial.HOLD], on_other_batches) == Trial.ACCEPT
    assert next_trial([Trial.REPEAT, Trial.HOLD], facts) == Trial.HOLD
    assert next_trial([Trial.REPEAT, Trial.HOLD, Trial.HOLD], facts) == Trial.ACCEPT
