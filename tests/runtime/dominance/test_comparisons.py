"""When weights are compared, with which anchors, and what follows. A model of one number."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter

from healcore.errors import SignalError
from healcore.runtime.dominance.evidence import ComparisonState, ObservedBatch, TrainedStep
from tests.runtime.dominance.toy_driver import LASTS, Run, damaged, healthy, noisy

# -- a verdict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("alarm", [True, False], ids=["alarm", "no detector"])
def test_damage_that_lasts_is_found_after_twenty_comparisons(alarm):
    run = Run(noisy)
    healthy(run, 250)
    verdict = damaged(run, alarm=alarm)
    assert run.assessments == ["worse"]
    assert verdict is not None, "a loss above all of the last hundred is a reason to look too"
    assert verdict.anchor == 200, "the one with the lowest mean loss, although it is young"
    assert verdict.onset == 250
    assert verdict.found == 250 + 19
    assert verdict.due == 250 + LASTS
    assert verdict.index == 250 + LASTS + 9, "half of the evidence again"
    assert verdict.evidence >= 1e4
    assert verdict.rise > 1
    assert verdict.rise_remembered > 1
    assert run.dominance.unusual(verdict) == []


@pytest.mark.parametrize(
    "change", [lambda loss: 1000 * loss, lambda loss: loss + 1e6], ids=["scale", "new term"]
)
def test_a_loss_that_changes_with_any_weights_is_no_evidence(change):
    changes = [lambda loss: loss]
    run = Run(lambda weight, batch: changes[-1](noisy(weight, batch)))
    healthy(run, 250)
    changes.append(change)
    healthy(run, 300, alarm=True)
    assert not run.dominance.suspects


@pytest.mark.parametrize(
    "loss",
    [
        lambda weight, batch: abs(weight - 6.6) + 1 if batch >= 250 else weight,
        lambda weight, batch: weight if batch >= 250 else -weight,
        lambda weight, batch: weight * (1 + 5e-7 * (batch % 2)),
        lambda weight, batch: noisy(weight, batch) if batch < 250 else math.nan,
    ],
    ids=["worse on the new data", "worse on an earlier batch", "same data", "NaN with both"],
)
def test_a_loss_that_shows_nothing_about_the_weights_is_no_evidence(loss):
    """With earlier weights, or with any."""
    run = Run(loss)
    healthy(run, 250)
    assert damaged(run) is None
    assert not run.dominance.suspects


def test_batches_and_norms_at_the_onset_that_are_unusual():
    """Three batches that the earlier weights find extraordinary, and a step with a large norm."""

    def loss(weight: float, batch: int) -> float:
        return noisy(weight, batch) + (50.0 if 250 <= batch < 253 else 0.0)

    run = Run(loss)
    for _ in range(250):
        run.take(run.step, weight=10.0 / (1 + run.step / 50), norm=1.0)
    level, verdict = run.driver.weight + 5.0, None
    while verdict is None:
        norm = 4.0 if run.step == 255 else 2.0
        verdict = run.take(run.step, weight=level, alarm=True, norm=norm)
    assert run.dominance.unusual(verdict) == [250, 251, 252, 255]


def test_the_rates_of_the_trouble_are_reported():
    run = Run(noisy)
    run.driver.rate = 0.25
    run.dominance.anchors.clear()
    run.dominance.keep(0, run.restorable)
    healthy(run, 250)
    run.driver.rate = 8.0
    verdict = damaged(run)
    assert verdict is not None
    assert verdict.healthy_rate == 0.25
    assert set(verdict.rates) == {8.0}


def test_the_onset_is_the_first_alarm_of_the_trouble():
    run = Run(noisy)
    healthy(run, 246)
    for _ in range(4):  # alarms, and the weights are not worse yet
        run.take(run.step, alarm=True)
    verdict = damaged(run)
    assert verdict is not None
    assert verdict.onset == 246


@pytest.mark.parametrize("recovers", [30, 48])
def test_a_run_that_recovers_before_a_rollback_would_pay_is_left_alone(recovers):
    run = Run(noisy)
    healthy(run, 250)
    level = run.driver.weight
    assert damaged(run, 20) is None
    before = run.driver.evaluations
    assert damaged(run, recovers - 20, by=0.0) is None
    assert run.driver.evaluations == before, "nothing is evaluated while the run may recover"
    assert run.until_verdict(300, weight=level - 0.5) is None
    assert run.assessments == ["worse", "recovered"]
    assert not run.dominance.suspects


def test_damage_soon_after_the_anchor_is_not_waited_for():
    """A rollback repeats little, and its evidence takes longer than that."""
    run = Run(noisy, interval=8)
    healthy(run, 250)
    verdict = damaged(run)
    assert verdict is not None
    assert verdict.index == verdict.found == 250 + 19
    assert verdict.anchor >= 230
    assert run.assessments == []


# -- NaN ------------------------------------------------------------------------------------------


def test_a_loss_that_is_nan_with_the_current_weights_alone_counts():
    run = Run(lambda weight, batch: math.nan if weight > 50 else noisy(weight, batch))
    healthy(run, 250)
    assert damaged(run, by=100.0) is not None


def test_a_sampled_batch_that_is_nan_with_both_is_no_evidence_against_damage():
    run = Run(lambda weight, batch: math.nan if batch % 4 == 0 else noisy(weight, batch))
    healthy(run, 250)
    assert damaged(run) is not None, "a third of the steps show nothing, and no step is a defeat"


# -- anchors --------------------------------------------------------------------------------------


def test_at_most_three_anchors_the_lowest_mean_loss_and_the_last_two_checkpoints():
    run = Run(noisy)
    seen = []
    for _ in range(7):
        healthy(run, 100)
        seen.append([each.step for each in run.dominance.anchors])
    assert seen[:3] == [[0, 100], [0, 100, 200], [100, 200, 300]]
    assert seen[-1] == [500, 600, 700], "the loss falls"
    for _ in range(400):  # it rises, and comparisons with any weights show no damage
        run.take(run.step, loss=run.step / 100)
    assert [each.step for each in run.dominance.anchors] == [700, 1000, 1100]


def test_an_anchor_is_compared_once_it_is_a_save_interval_old():
    """At the start half of the run is old enough, and eight steps at least."""
    run = Run(noisy)
    assert run.dominance._eligible_anchors(7) == []
    assert [each.step for each in run.dominance._eligible_anchors(8)] == [0]
    healthy(run, 250)
    assert [each.step for each in run.dominance._eligible_anchors(150)] == [0]
    assert [each.step for each in run.dominance._eligible_anchors(200)] == [100]
    assert [each.step for each in run.dominance._eligible_anchors(299)] == [100]
    assert [each.step for each in run.dominance._eligible_anchors(300)] == [200]


def test_suspect_weights_are_no_anchor_and_a_rollback_drops_later_ones():
    run = Run(noisy)
    healthy(run, 290)
    assert damaged(run) is not None
    assert [each.step for each in run.dominance.anchors] == [0, 100, 200]
    run.dominance.on_rollback(150)
    assert [each.step for each in run.dominance.anchors] == [0, 100]
    assert all(step.index < 150 for each in run.dominance.anchors for step in each.sample)
    assert not run.dominance.suspects


def test_an_accepted_level_is_not_compared_and_new_copies_are_made_after_it():
    run = Run(noisy)
    healthy(run, 250)
    run.dominance.accept(400)
    assert not run.dominance.anchors
    before = run.driver.evaluations
    assert damaged(run, 150) is None
    assert run.driver.evaluations == before
    healthy(run, 110)
    assert damaged(run, 300) is not None, "worse than the level that was accepted"


@pytest.mark.parametrize("rate", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_can_be_saved(rate):
    """JSON has no such numbers, and a save that raises loses the run's work."""
    run = Run(noisy)
    run.driver.rate = rate
    healthy(run, 250)
    assert damaged(run, 10) is None
    assert run.dominance.suspects
    text = json.dumps(asdict(run.dominance.state), allow_nan=False)
    read = TypeAdapter(ComparisonState).validate_json(text, strict=True)
    assert read == run.dominance.state
    assert [each.draw() for each in read.anchors] == [None] * len(read.anchors)


# -- a loss_fn that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [KeyError("labels"), None], ids=["raises", "no number"])
@pytest.mark.parametrize("trouble", [0, 40])
def test_a_loss_fn_that_fails_later_is_not_called_again(wrong, trouble):
    """Also while a verdict is pending: the run can end."""
    calls = []

    def loss(weight: float, batch: int) -> Any:
        if batch < 250 + trouble:
            return noisy(weight, batch)
        calls.append(batch)
        if wrong is not None:
            raise wrong
        return (1.0, 2.0)

    run = Run(loss)
    healthy(run, 250)
    assert damaged(run, trouble) is None
    for _ in range(LASTS):
        assert run.take(run.step, weight=9.0, alarm=True, loss=9.0) is None
    assert len(calls) == 1
    assert not run.dominance.is_enabled
    assert run.dominance.at_end(run.step) is None
    assert not run.dominance.anchors, "their memory is free"
    (line,) = run.warnings
    assert type(wrong or SignalError("")).__name__ in line


# -- accumulations, and what is kept --------------------------------------------------------------


def test_parts_of_a_batch_count_by_their_weights():
    """The mean of an accumulation is that of the training loss."""
    run = Run(lambda weight, batch: weight + float(batch))
    healthy(run, 250)
    step = TrainedStep(run.step, (ObservedBatch(1.0, 0.75), ObservedBatch(5.0, 0.25)))
    found = run.dominance._losses_of([step], run.dominance.anchors[0])
    assert found is not None
    [now], [then] = found
    assert now == pytest.approx(run.driver.weight + 2.0)
    assert then == pytest.approx(10.0 + 2.0), "the first weight"


def test_without_a_loss_fn_nothing_is_kept():
    run = Run(None)
    assert not run.dominance.is_enabled
    assert run.dominance.anchors == []
    step = TrainedStep(0, (ObservedBatch(0),))
    assert run.dominance.observe(step, 1.0, alarm=True, trained=True) is None


def test_an_anchor_whose_checkpoint_is_gone_is_dropped():
    run = Run(lambda weight, batch: weight)
    for step in range(300):
        run.take(step)
    assert [each.step for each in run.dominance.anchors] == [100, 200, 300]
    run.restorable = {200, 300, 400}
    for step in range(100):
        run.take(step)
    assert [each.step for each in run.dominance.anchors] == [200, 300, 400]
    run.restorable = set()
    for step in range(100):
        run.take(step)
    assert run.dominance.anchors == []


def test_within_an_accumulation_nothing_is_compared():
    run = Run(lambda weight, batch: weight + batch % 7)
    run.take(0)
    before = run.driver.evaluations  # of the check of the loss_fn
    run.driver.weight, run.driver.accumulates = 500.0, True
    for step in range(200):
        run.take(step, alarm=True)
    assert run.driver.evaluations == before


class Two:
    """Two ranks that agree."""

    rank, world = 0, 2

    def gather(self, item: Any) -> list[Any]:
        return [item, item]


@pytest.mark.parametrize("ranks", [None, Two()], ids=["one rank", "two ranks"])
@pytest.mark.parametrize(("given", "free"), [(15.0, True), (9.0, False)])
def test_a_loop_that_observes_the_loss_fn_needs_one_call_less(given, free, ranks):
    """The loss_fn predicts the first loss with the weights before its update."""
    run = Run(lambda weight, batch: weight + batch, ranks=ranks)
    run.driver.weight = 4.0
    run.take(5, loss=given)
    assert run.dominance.loss_function.gives_loss is free
