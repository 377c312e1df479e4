"""Which earlier weights are kept and compared, and what the rises of their losses are."""

import math

import pytest

from healcore.runtime.run.compare.anchor_choice import (
    best_on_average,
    newest_better,
    to_compare,
    with_new,
)
from healcore.runtime.run.compare.evidence import Anchor
from healcore.runtime.run.compare.rises import joined, rise_of


def test_the_best_and_the_last_two_are_kept():
    best, middle, last, new = (
        Anchor(step, level=level) for step, level in ((0, 1.0), (100, 2.0), (200, 3.0), (300, 0.5))
    )
    assert with_new([best], middle) == [best, middle]
    assert with_new([best, middle, last], new) == [best, last, new]
    # The first weights of a process have no mean, and go before any that has one.
    assert with_new([Anchor(0), middle, last], new) == [middle, last, new]


def test_the_newest_old_enough_one_is_compared_and_older_ones_with_evidence():
    first, second, young = Anchor(0), Anchor(100), Anchor(290)
    anchors = [first, second, young]
    assert to_compare(anchors, 299, every=100) == [second]
    first.evidence = 2.0
    assert to_compare(anchors, 299, every=100) == [first, second]
    assert to_compare(anchors, 299, every=100, best=young) == anchors


@pytest.mark.parametrize(("mean", "index", "found"), [(1.2, 50, True), (1.0, 50, False), (9, 5, 0)])
def test_a_mean_above_the_best_by_more_than_its_spread_names_the_best(mean, index, found):
    best = Anchor(0, level=1.0, spread=0.1)
    assert best_on_average([Anchor(20), best], mean, index) == (best if found else None)
    assert best_on_average([], mean, index) is None


def test_a_rollback_goes_to_the_newest_of_the_better_ones_up_to_the_onset():
    first, second, late = Anchor(0, onset=250), Anchor(200, evidence=100.0), Anchor(300)
    late.evidence = 100.0
    assert newest_better([first, second, late], first, 100.0) is second
    assert newest_better([first, second, late], first, 101.0) is first


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


def test_the_smaller_of_the_rise_and_of_the_median_past_rise_is_the_evidence():
    past = [(9.0, 1.0), (3.0, 2.5), (2.0, 3.0)]
    assert joined(8, (4.0, 2.0), past) == (8, 0.5, 2.0)
    assert joined(8, (2.1, 2.0), [(9.0, 1.0)])[1] == pytest.approx(0.1)


def test_equal_batches_are_no_evidence():
    found = joined(4, (4.0, 2.0), [(4.0, 2.0)])
    assert math.isnan(found.evidence)
    assert found.rise == 2.0
