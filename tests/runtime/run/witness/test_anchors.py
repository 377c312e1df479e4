"""Which earlier weights are kept as anchors, and when they are compared."""

import copy

from healcore.runtime.run.witness.evidence import SAMPLE_SIZE, to_compare
from tests.runtime.run.witness.toy_driver import (
    OTHER_PARAMETERS,
    ToyRun,
    healthy_run,
    noisy,
    train_damaged,
    train_healthy,
)


def anchor_steps(run: ToyRun) -> list[int]:
    return [anchor.step for anchor in run.witness.state.anchors]


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
        chosen = to_compare(run.witness.state.anchors, index, every=run.interval)
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
    saved = copy.deepcopy(run.witness.state)
    train_healthy(run, 140)
    assert train_damaged(run) is not None

    run.witness.continue_from(saved, 150)

    assert anchor_steps(run) == [0, 100]
    for anchor in run.witness.state.anchors:
        assert all(step.index < 150 for step in anchor.sample)
    assert not run.witness.state.has_evidence
    assert run.witness.state.spent == 0.0


def test_an_accepted_level_is_not_compared_and_new_copies_are_made_after_it():
    run = healthy_run(250)
    run.witness.pause_until(400)
    assert not run.witness.state.anchors

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


def test_other_parameters_end_the_suspicion_and_all_anchors():
    run = healthy_run(250)
    assert train_damaged(run, 5) is None
    assert run.witness.state.has_evidence
    for anchor in run.witness.state.anchors:
        anchor.weights = OTHER_PARAMETERS
    run.take(run.step, alarm=True)
    assert anchor_steps(run) == []
    assert not run.witness.state.has_evidence
