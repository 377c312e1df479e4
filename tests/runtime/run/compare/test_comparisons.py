"""Which earlier weights are kept as anchors, and when they are compared."""

import copy

import pytest

from healcore.runtime.run.compare.anchor_choice import to_compare
from healcore.runtime.run.compare.evidence import SAMPLE_SIZE
from healcore.runtime.run.compare.trained_step import TrainedStep
from tests.runtime.run.compare.arithmetic import MAX_CREDIT, THRESHOLD, TO_VERDICT
from tests.runtime.run.compare.toy_driver import (
    OTHER_PARAMETERS,
    ToyRun,
    healthy_run,
    healthy_weight,
    noisy,
    train_damaged,
    train_healthy,
)


def anchor_steps(run: ToyRun) -> list[int]:
    return [anchor.step for anchor in run.comparisons.anchors]


def test_the_anchors_are_the_lowest_mean_loss_and_the_last_two_checkpoints():
    run = healthy_run(200)
    assert anchor_steps(run) == [0, 100, 200]
    train_healthy(run, 500)
    assert anchor_steps(run) == [500, 600, 700], "the loss falls"
    for _ in range(400):  # it rises, and comparisons with any weights show no damage
        run.take(run.step, loss=run.step / 100)
    assert anchor_steps(run) == [700, 1000, 1100]


def test_an_anchor_is_compared_once_it_is_a_save_interval_old():
    """At the start half of the run is old enough, and eight steps at least."""
    run = ToyRun(noisy)

    def compared_at(index: int) -> list[int]:
        chosen = to_compare(run.comparisons.anchors, index, every=run.interval)
        return [anchor.step for anchor in chosen]

    assert compared_at(SAMPLE_SIZE - 2) == []
    assert compared_at(SAMPLE_SIZE - 1) == [0]

    train_healthy(run, 250)  # anchors at 0, 100 and 200
    assert compared_at(150) == [0]
    assert compared_at(199) == [100]
    assert compared_at(298) == [100]
    assert compared_at(299) == [200]


def test_suspect_weights_are_no_anchor():
    run = healthy_run(290)
    assert train_damaged(run) is not None
    assert run.step > 300
    assert anchor_steps(run) == [0, 100, 200]


def test_a_rollback_drops_what_came_after_its_target():
    run = healthy_run(150)
    saved = copy.deepcopy(run.comparisons.to_save())
    train_healthy(run, 140)
    assert train_damaged(run) is not None
    run.comparisons.observe(TrainedStep(run.step, ()), 9.0, alarm=False, taken=True)

    run.comparisons.continue_from(saved, 150)

    trained_since = {anchor.step: anchor.trained for anchor in run.comparisons.anchors}
    assert trained_since == {0: 150, 100: 50}
    for anchor in run.comparisons.anchors:
        assert all(step.index < 150 for step in anchor.sample)
    assert not run.comparisons.has_evidence
    assert run.comparisons.credit.left == pytest.approx(MAX_CREDIT)


def test_a_rollback_drops_the_losses_of_an_unfinished_dispatch():
    """Otherwise the next comparison would take their mean for the loss of the restored weights."""
    evidence: list[list[float]] = []
    for is_unfinished in (False, True):
        run = healthy_run(250)
        saved = copy.deepcopy(run.comparisons.to_save())
        train_healthy(run, 40)
        if is_unfinished:
            step = TrainedStep(run.step, ())
            run.comparisons.observe(step, -9.0, alarm=False, taken=True)
        run.comparisons.continue_from(saved, 250)
        run.step = 250
        before = run.driver.evaluations
        run.take(run.step, weight=healthy_weight(run.step) + 5.0, alarm=True)
        assert run.driver.evaluations > before, "the step is compared"
        evidence.append([anchor.evidence for anchor in run.comparisons.anchors])
    assert evidence[0] == evidence[1]


def test_an_accepted_level_is_not_compared_and_new_copies_are_made_after_it():
    run = healthy_run(250)
    run.comparisons.pause_until(400)
    assert not run.comparisons.anchors

    before = run.driver.evaluations
    assert train_damaged(run, 150) is None
    assert run.driver.evaluations == before

    train_healthy(run, 110)
    assert train_damaged(run, 300) is not None, "worse than the level that was accepted"


def test_an_anchor_whose_checkpoint_is_gone_is_dropped():
    run = healthy_run(300)
    run.restorable = {200, 300, 400}
    train_healthy(run, 100)
    assert anchor_steps(run) == [200, 300, 400]
    run.restorable = set()
    train_healthy(run, 100)
    assert anchor_steps(run) == []


@pytest.mark.parametrize(("changed", "found"), [(100, 200), (200, 100)])
def test_an_anchor_of_other_parameters_costs_the_other_anchors_no_comparison(changed, found):
    """The step that completes the evidence is compared with both anchors, the older one first."""
    run = healthy_run(250)
    last = run.step + TO_VERDICT - 1
    level = run.driver.weight + 5.0
    while run.step < last:
        assert run.take(run.step, weight=level, alarm=True) is None
    assert not run.assessments, "the evidence is not complete yet"
    anchor, other = run.comparisons.state.anchor_of(changed), run.comparisons.state.anchor_of(found)
    assert anchor is not None
    assert other is not None
    anchor.weights, anchor.evidence = OTHER_PARAMETERS, 1.0
    other.evidence = 0.9 * THRESHOLD
    run.comparisons.credit.left = 0.0

    run.take(run.step, weight=level, alarm=True)

    assert run.assessments == ["worse"]
    verdict = run.comparisons.state.verdict
    assert verdict is not None
    assert (verdict.better_step, verdict.found_at) == (found, last)
    assert run.comparisons.state.anchor_of(changed) is None
    assert run.comparisons.credit.left < 0.0, "the comparison with the other anchor is charged"


def test_no_verdict_stands_about_weights_that_were_dropped_in_the_same_comparison():
    """Nothing could test such a verdict again: the next comparison finds it about other weights."""
    run = healthy_run(250)
    last = run.step + TO_VERDICT - 1
    level = run.driver.weight + 5.0
    while run.step < last:
        assert run.take(run.step, weight=level, alarm=True) is None
    anchor = run.comparisons.state.anchor_of(200)
    assert anchor is not None
    anchor.weights = OTHER_PARAMETERS  # its strong evidence makes it the anchor of the verdict

    run.take(run.step, weight=level, alarm=True)
    assert run.comparisons.state.verdict is None

    run.take(run.step, weight=level, alarm=True)
    verdict = run.comparisons.state.verdict
    assert verdict is not None
    assert verdict.better_step == 100
