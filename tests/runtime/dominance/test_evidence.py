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

from healcore.runtime.dominance.evidence import (
    RECENT,
    SAMPLE,
    STAKE,
    Anchor,
    ObservedBatch,
    TrainedStep,
)


def anchor() -> Anchor:
    return Anchor(0, None)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_evidence_is_the_largest_product_of_any_run_of_comparisons(wins):
    """The bet's product from the best starting point, as a CUSUM is of a log-likelihood."""
    a = anchor()
    for index, won in enumerate(wins):
        a.learn(index, 1.0 if won else -1.0)
    factors = [1 + STAKE if won else 1 - STAKE for won in wins]
    products = [math.prod(factors[start:]) for start in range(len(factors))]
    assert a.evidence == pytest.approx(max(products), rel=1e-9)
    assert (a.onset is None) == (a.evidence <= 1)
    if a.onset is not None:
        assert products[a.onset] == pytest.approx(a.evidence)
        assert wins[a.onset], "it begins with a comparison that was won"


def comparisons_until(c: float, rises: Iterator[float], most: int = 10_000) -> int:
    """Number of comparisons until the evidence reaches c, or `most`."""
    a = anchor()
    for index, rise in enumerate(itertools.islice(rises, most)):
        a.learn(index, rise)
        if a.evidence >= c:
            return index + 1
    return most


def bet(rng: random.Random, chance: float) -> float:
    return 1.0 if rng.random() < chance else -1.0


HEALTHY: dict[str, Callable[[list[float], random.Random], float]] = {
    "coin": lambda past, rng: bet(rng, 0.5),
    # An even chance decides two comparisons at once, the second at one half or none.
    "swings": lambda past, rng: bet(rng, 0.5 * (len(past) % 2 == 0 or past[-1] > 0)),
    "after wins": lambda past, rng: bet(rng, 0.5 if past[-1:] == [1.0] else 0.4),
    "heavy tails": lambda past, rng: math.tan(math.pi * (rng.random() - 0.5)),
    "rare losses": lambda past, rng: bet(rng, 0.5) * (50.0 if rng.random() < 0.05 else 1.0),
    "worse of two": lambda past, rng: min(rng.gauss(0.5, 1), rng.gauss(0.5, 1)),
    "not finite": lambda past, rng: rng.choice([math.inf, -math.inf, 0.1, -0.1]),
}
"""Rises whose bet is fair at most, whatever the past."""


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("c", [10.0, 50.0])
def test_a_healthy_run_has_at_least_c_comparisons_to_a_false_order_on_average(name, c):
    rng = random.Random(1)

    def rises() -> Iterator[float]:
        past: list[float] = []
        while True:
            past.append(HEALTHY[name](past, rng))
            yield past[-1]

    found = [comparisons_until(c, rises(), int(20 * c)) for _ in range(300)]
    mean = sum(found) / len(found)
    spread = math.sqrt(sum((each - mean) ** 2 for each in found)) / len(found)
    assert mean + 3 * spread >= c


def test_damage_that_leaves_most_batches_unharmed_is_found():
    """The mean of the loss is much higher, although the current weights win on most batches."""
    rng = random.Random(3)
    for otherwise, most in ((-0.01, 100), (-3.0, 10_000)):
        rises = (3.0 if rng.random() < 0.4 else otherwise for _ in itertools.count())
        assert (comparisons_until(1e4, rises, most) < most) is (otherwise == -0.01)


def test_one_huge_rise_does_not_hide_the_others():
    """Damage is found after a logarithm of the evidence that is needed."""
    assert math.ceil(math.log(1e4) / math.log(1 + STAKE)) == 20
    rises = (1e9 if index == 5 else 1.0 for index in itertools.count())
    assert comparisons_until(1e4, rises) == 20


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
    a = filled(3, 8)
    assert {step.index for step in (a.draw() for _ in range(200)) if step} == {*range(8)}
