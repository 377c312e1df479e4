"""The evidence of an anchor: its arithmetic, its theorem, and its sample of batches."""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.run.witness.evidence import (
    SAMPLE_SIZE,
    STAKE,
    Anchor,
    ObservedBatch,
    TrainedStep,
    rise_of,
)
from tests.runtime.run.witness.arithmetic import THRESHOLD, TO_VERDICT

WON, LOST = 1.0, -1.0
"""Rises of the loss by which the earlier weights win a comparison, or lose it."""


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_the_evidence_is_the_largest_product_of_any_run_of_comparisons(wins):
    """The bet's product from the best starting point, as a CUSUM is of a log-likelihood."""
    anchor = Anchor(0)
    for index, won in enumerate(wins):
        anchor.learn(index, WON if won else LOST)

    factors = [1 + STAKE if won else 1 - STAKE for won in wins]
    products = [math.prod(factors[start:]) for start in range(len(factors))]
    assert anchor.evidence == pytest.approx(max(products), rel=1e-9)

    assert (anchor.onset is None) == (anchor.evidence <= 1)
    if anchor.onset is not None:
        assert products[anchor.onset] == pytest.approx(anchor.evidence)
        assert wins[anchor.onset], "it begins with a comparison that was won"


# -- how long it takes to a verdict ----------------------------------------------------------------


def comparisons_until(evidence: float, rises: Iterator[float], most: int = 10_000) -> int:
    """Number of comparisons until an anchor has that evidence, or `most`."""
    anchor = Anchor(0)
    for index, rise in enumerate(itertools.islice(rises, most)):
        anchor.learn(index, rise)
        if anchor.evidence >= evidence:
            return index + 1
    return most


def bet(rng: random.Random, chance: float) -> float:
    """A rise by which the earlier weights win with that chance."""
    return WON if rng.random() < chance else LOST


def coin(past: list[float], rng: random.Random) -> float:
    return bet(rng, 0.5)


def swings(past: list[float], rng: random.Random) -> float:
    """An even chance decides two comparisons at once, the second at one half or none."""
    is_first = len(past) % 2 == 0
    return bet(rng, 0.5 if is_first or past[-1] > 0 else 0.0)


def heavy_tails(past: list[float], rng: random.Random) -> float:
    return math.tan(math.pi * (rng.random() - 0.5))


def rare_losses(past: list[float], rng: random.Random) -> float:
    return bet(rng, 0.5) * (50.0 if rng.random() < 0.05 else 1.0)


def not_finite(past: list[float], rng: random.Random) -> float:
    return rng.choice([math.inf, -math.inf, 0.1, -0.1])


@pytest.mark.parametrize("fair", [coin, swings, heavy_tails, rare_losses, not_finite])
def test_a_healthy_run_has_at_least_c_comparisons_to_a_false_order_on_average(fair):
    """The next rise is fair at most, whatever the past. The theorem holds for any evidence c."""
    c, rng, runs = 20.0, random.Random(1), 300

    def rises() -> Iterator[float]:
        past: list[float] = []
        while True:
            past.append(fair(past, rng))
            yield past[-1]

    lengths = [comparisons_until(c, rises(), most=int(20 * c)) for _ in range(runs)]

    mean = statistics.fmean(lengths)
    standard_error = statistics.pstdev(lengths) / math.sqrt(runs)
    assert mean + 3 * standard_error >= c


@pytest.mark.parametrize(
    ("otherwise", "most", "is_found"),
    [
        pytest.param(-0.01, 100, True, id="the mean is much higher"),
        pytest.param(-3.0, 10_000, False, id="the mean is lower"),
    ],
)
def test_damage_that_leaves_most_batches_unharmed_is_found(otherwise, most, is_found):
    """On two of five batches the loss is higher by 3. The current weights win on the others."""
    rng = random.Random(3)

    def rises() -> Iterator[float]:
        while True:
            yield 3.0 if rng.random() < 0.4 else otherwise

    assert (comparisons_until(THRESHOLD, rises(), most) < most) is is_found


def test_one_huge_rise_does_not_hide_the_others():
    """A huge rise counts as a usual rise, because a bet is at most 1."""
    rises = itertools.chain([1.0] * 5, [1e9], itertools.repeat(1.0))
    assert comparisons_until(THRESHOLD, rises) == TO_VERDICT


# -- the sample of batches -------------------------------------------------------------------------


def filled(step: int, steps: int) -> Anchor:
    """The anchor of a step, which also seeds its sample, after so many later steps."""
    anchor = Anchor(step)
    for index in range(steps):
        anchor.add(TrainedStep(index, (ObservedBatch(index),)), is_usual=True)
    return anchor


def indices(steps: Iterable[TrainedStep]) -> list[int]:
    return [step.index for step in steps]


def drawn_often(anchor: Anchor, count: int) -> set[int]:
    """The steps that are among `count` drawn ones in any of 200 draws."""
    found: set[int] = set()
    for _ in range(200):
        found.update(indices(anchor.draw(count)))
    return found


def test_the_sample_is_uniform_over_all_steps_since():
    """Each of 40 steps is kept with the chance 8 / 40, the first like the last."""
    anchors, steps = 3000, 40
    counts: Counter[int] = Counter()
    for step in range(anchors):
        counts.update(indices(filled(step, steps).sample))

    expected = anchors * SAMPLE_SIZE / steps
    chi2 = sum((counts[index] - expected) ** 2 / expected for index in range(steps))
    assert chi2 < 72, "39 degrees of freedom: 99.9 % are below"


def test_a_sample_is_the_same_in_every_process():
    assert indices(filled(7, 100).sample) == indices(filled(7, 100).sample)
    assert filled(7, 100).draw(3) == filled(7, 100).draw(3)


def test_each_step_of_the_sample_is_drawn():
    assert drawn_often(filled(3, 8), 1) == {*range(8)}
    assert Anchor(0).draw(3) == [], "there is none"


def test_other_steps_are_sampled_only_where_usual_steps_are_missing():
    """On a bad batch that the model has trained on, damaged weights are better."""
    anchor = filled(3, 4)
    for index in range(4, 60):
        anchor.add(TrainedStep(index, ()), is_usual=False)
    assert drawn_often(anchor, 3) == {*range(4)}

    few = Anchor(3)
    for index in range(20):
        few.add(TrainedStep(index, ()), is_usual=False)
    assert drawn_often(few, 3) == {*range(3)}


@pytest.mark.parametrize(
    ("now", "then", "rise"),
    [
        (2.0, 1.0, 1.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.inf, -math.inf),
        (math.inf, math.nan, math.nan),
    ],
)
def test_a_loss_that_is_not_finite_counts_as_the_highest(now, then, rise):
    assert rise_of(now, then) == pytest.approx(rise, nan_ok=True)
