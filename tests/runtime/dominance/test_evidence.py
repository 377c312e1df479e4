"""The evidence of an anchor: its arithmetic, its theorem, its sample of batches."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.dominance.anchor import (
    RECENT,
    SAMPLE,
    STAKE,
    Anchor,
    ObservedBatch,
    TrainedStep,
)


def anchor() -> Anchor:
    return Anchor(0, None)


def as_maximum(wins: list[bool]) -> float:
    """The evidence in closed form: the largest product over a run of comparisons that ends now."""
    factors = [1 + STAKE if won else 1 - STAKE for won in wins]
    return max(math.prod(factors[start:]) for start in range(len(factors)))


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_evidence_is_the_largest_product_of_any_run_of_comparisons(wins):
    """The bet's product from the best starting point, as a CUSUM is of a log-likelihood."""
    a = anchor()
    for index, won in enumerate(wins):
        a.learn(index, 1.0 if won else -1.0)
    assert a.evidence == pytest.approx(as_maximum(wins), rel=1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_onset_is_where_the_best_run_began(wins):
    a = anchor()
    for index, won in enumerate(wins):
        a.learn(index, 1.0 if won else -1.0)
    if a.evidence <= 1:
        assert a.onset is None
        return
    assert a.onset is not None
    factors = [1 + STAKE if won else 1 - STAKE for won in wins]
    assert math.prod(factors[a.onset :]) == pytest.approx(a.evidence)
    assert wins[a.onset], "it begins with a comparison that was won"


Adversary = Callable[[list[bool], float, random.Random], bool]


def coin(past: list[bool], evidence: float, rng: random.Random) -> bool:
    return rng.random() < 0.5


def surely_then_never(past: list[bool], evidence: float, rng: random.Random) -> bool:
    """Swings: an even chance decides two comparisons at once, the second at one half or none."""
    return rng.random() < (0.5 if len(past) % 2 == 0 or past[-1] else 0.0)


def after_wins(past: list[bool], evidence: float, rng: random.Random) -> bool:
    """Even chances only after a win, less otherwise."""
    return rng.random() < (0.5 if past[-1:] == [True] else 0.4)


def comparisons_until(c: float, chance: Adversary, rng: random.Random) -> int:
    a, past = anchor(), []
    for index in itertools.count():
        won = chance(past, a.evidence, rng)
        past.append(won)
        a.learn(index, 1.0 if won else -1.0)
        if a.evidence >= c:
            return index + 1
        if index > 20 * c:  # later is no smaller mean
            return index
    raise AssertionError


@pytest.mark.parametrize("chance", [coin, surely_then_never, after_wins])
@pytest.mark.parametrize("c", [10.0, 50.0])
def test_a_healthy_run_has_at_least_c_comparisons_to_a_false_order_on_average(chance, c):
    """Whatever the past, the chance of a win is at most one half."""
    rng = random.Random(1)
    found = [comparisons_until(c, chance, rng) for _ in range(300)]
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((each - mean) ** 2 for each in found)) / len(found)
    assert mean + 3 * spread >= c


HEALTHY: dict[str, Callable[[random.Random], float]] = {
    "heavy tails": lambda rng: math.tan(math.pi * (rng.random() - 0.5)),
    "rare losses": lambda rng: rng.choice([1.0, -1.0]) * (50.0 if rng.random() < 0.05 else 1.0),
    "worse of two": lambda rng: min(rng.gauss(0.5, 1), rng.gauss(0.5, 1)),
    "not finite": lambda rng: rng.choice([math.inf, -math.inf, 0.1, -0.1]),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_rises_of_any_size_whose_bet_is_fair_reach_c_after_c_comparisons(name):
    rng, c, found = random.Random(2), 50.0, []
    for _ in range(300):
        a, index = anchor(), 0
        while a.evidence < c and index < 20 * c:
            a.learn(index, HEALTHY[name](rng))
            index += 1
        found.append(index)
    assert sum(found) / len(found) >= c


def until_found(rises: Iterator[float], most: int = 10_000) -> int | None:
    a = anchor()
    for index, rise in enumerate(itertools.islice(rises, most)):
        a.learn(index, rise)
        if a.evidence >= 1e4:
            return index + 1
    return None


def test_damage_that_leaves_most_batches_unharmed_is_found():
    """The mean of the loss is much higher, although the current weights win on most batches."""
    rng = random.Random(3)
    found = until_found(3.0 if rng.random() < 0.4 else -0.01 for _ in itertools.count())
    assert found is not None
    assert found < 100
    assert until_found(3.0 if rng.random() < 0.4 else -3.0 for _ in itertools.count()) is None


def test_one_huge_rise_does_not_hide_the_others():
    """Damage is found after a logarithm of the evidence that is needed."""
    assert math.ceil(math.log(1e4) / math.log(1 + STAKE)) == 20
    assert until_found(1e9 if index == 5 else 1.0 for index in itertools.count()) == 20


def test_small_wins_end_a_suspicion_of_large_rises():
    """So that a run that has recovered is not compared for ever."""
    a = anchor()
    for index in range(12):
        a.learn(index, 100.0)
    assert a.evidence > 100
    for index in range(12, 12 + RECENT + 7):
        a.learn(index, -1e-3)
    assert a.evidence <= 1


@given(st.lists(st.floats(allow_nan=False)))
def test_a_bet_loses_or_wins_at_most_the_stake(rises):
    a = anchor()
    for index, rise in enumerate(rises):
        before = max(1.0, a.evidence)
        a.learn(index, rise)
        factor = a.evidence / before
        assert 1 - STAKE - 1e-9 <= factor <= 1 + STAKE + 1e-9
        assert (factor > 1) <= (rise > 0)


# -- the sample of batches ------------------------------------------------------------------------


def filled(step: int, number: int) -> Anchor:
    a = Anchor(step, None)
    for index in range(number):
        a.add(TrainedStep(index, (ObservedBatch(index),)))
    return a


def test_the_sample_is_uniform_over_all_steps_since():
    """Of 40 steps each is kept with the chance 8 / 40, the first like the last."""
    counts: Counter[int] = Counter()
    runs = 3000
    for step in range(runs):  # the step seeds the sample
        counts.update(each.index for each in filled(step, 40).sample)
    expected = runs * SAMPLE / 40
    chi2 = sum((counts[index] - expected) ** 2 / expected for index in range(40))
    assert chi2 < 72, "39 degrees of freedom: 99.9 % are below"


def test_a_sample_is_the_same_in_every_process():
    assert [e.index for e in filled(7, 100).sample] == [e.index for e in filled(7, 100).sample]
    assert [filled(7, 100).draw(), filled(7, 100).draw()] == [filled(7, 100).draw()] * 2
    assert len(filled(7, 3).sample) == 3
    assert anchor().draw() is None


def test_every_step_of_the_sample_is_drawn():
    a = filled(3, 8)
    drawn = {step.index for step in (a.draw() for _ in range(200)) if step}
    assert drawn == set(range(8))
