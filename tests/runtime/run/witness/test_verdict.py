"""How damage leads to a verdict, and when the run waits to see whether it recovers."""

import math
import random

import pytest

from healcore.runtime.run.trouble import RollbackRecord, Trouble
from healcore.runtime.run.witness.evidence import STAKE
from tests.runtime.run.witness.arithmetic import AGAIN, TO_VERDICT
from tests.runtime.run.witness.toy_driver import (
    LASTS,
    ToyRun,
    healthy_run,
    noisy,
    train_damaged,
    train_healthy,
)

DAMAGE = 250
"""Step at which the weights are damaged, unless a test says otherwise."""
AT_ONCE = DAMAGE + TO_VERDICT - 1
"""Step at which the evidence is complete: each step from the damage on is compared."""


@pytest.mark.parametrize("alarm", [True, False], ids=["alarm", "no detector"])
def test_damage_that_lasts_is_found_after_twenty_comparisons(alarm):
    run = healthy_run(DAMAGE)
    verdict = train_damaged(run, alarm=alarm)

    # What was found, and where the damage began.
    assert verdict.onset == DAMAGE
    assert verdict.found_at == AT_ONCE
    assert verdict.better_step == 200, "the anchor with the lowest mean loss, although it is young"

    # The run has had its time to recover, and is still worse.
    assert verdict.recovers_until == DAMAGE + LASTS
    assert run.step == verdict.recovers_until + AGAIN
    assert run.assessments == ["worse"]


def another_scale(weight: float, batch: int) -> float:
    return 1000 * noisy(weight, batch) + 1e6


def worse_on_the_new_data(weight: float, batch: int) -> float:
    return abs(weight - 6.6) + 1


def the_same_with_any_weight(weight: float, batch: int) -> float:
    return 10.0


def always_nan(weight: float, batch: int) -> float:
    return math.nan


@pytest.mark.parametrize(
    ("later_loss", "by"),
    [
        (another_scale, 0.0),
        (worse_on_the_new_data, 5.0),
        (the_same_with_any_weight, 5.0),
        (always_nan, 5.0),
    ],
)
def test_a_loss_that_shows_nothing_about_the_weights_is_no_evidence(later_loss, by):
    def loss(weight: float, batch: int) -> float:
        if batch >= DAMAGE:
            return later_loss(weight, batch)
        return noisy(weight, batch)

    run = healthy_run(DAMAGE, loss)
    assert train_damaged(run, by=by) is None
    assert not run.witness.state.has_evidence


def nan_with_large_weights(weight: float, batch: int) -> float:
    return math.nan if weight > 50 else noisy(weight, batch)


def nan_on_every_fourth_batch(weight: float, batch: int) -> float:
    return math.nan if batch % 4 == 0 else noisy(weight, batch)


@pytest.mark.parametrize(
    ("loss", "by"), [(nan_with_large_weights, 100.0), (nan_on_every_fourth_batch, 5.0)]
)
def test_damage_is_found_although_some_losses_are_nan(loss, by):
    """With the current weights alone NaN counts; with both it is no evidence against damage."""
    run = healthy_run(DAMAGE, loss)
    assert train_damaged(run, by=by) is not None


def test_damage_is_found_although_the_model_fits_the_bad_batches_that_caused_it():
    bad = range(DAMAGE, DAMAGE + 20)

    def loss(weight: float, batch: int) -> float:
        if batch in bad:
            return 60.0 - 5 * weight  # only damaged weights have a low loss here
        return noisy(weight, batch)

    run = healthy_run(DAMAGE, loss)
    assert train_damaged(run, alarm=True) is not None


# -- the wait for a recovery -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "recovers_after", [TO_VERDICT + 10, LASTS - 2], ids=["soon", "at the last moment"]
)
def test_a_run_that_recovers_before_a_rollback_would_pay_is_left_alone(recovers_after):
    run = healthy_run(DAMAGE)
    assert train_damaged(run, TO_VERDICT) is None

    before = run.driver.evaluations
    assert train_damaged(run, recovers_after - TO_VERDICT, by=0.0) is None
    assert run.driver.evaluations == before, "nothing is evaluated while the run may recover"

    assert train_damaged(run, 300, by=-5.5, alarm=False) is None
    assert run.assessments == ["worse", "recovered"]
    assert not run.witness.state.has_evidence


def test_damage_soon_after_the_anchor_is_not_waited_for():
    """A rollback repeats little, and its evidence takes longer than the repeated steps."""
    run = ToyRun(noisy, interval=8)
    train_healthy(run, DAMAGE)
    verdict = train_damaged(run)
    assert run.step - 1 == verdict.found_at == AT_ONCE
    assert verdict.better_step > DAMAGE - TO_VERDICT
    assert run.assessments == []


ROLLED_BACK = RollbackRecord(
    trouble=Trouble(onset=DAMAGE, found_at=299, since=DAMAGE), step=300, checkpoint=200
)


def test_trouble_that_was_rolled_back_already_has_no_second_wait():
    run = healthy_run(DAMAGE)
    run.record.ledger.rollbacks.append(ROLLED_BACK)
    verdict = train_damaged(run)
    assert run.step - 1 == verdict.found_at == AT_ONCE
    assert run.assessments == []


def test_trouble_after_the_rolled_back_steps_has_its_own_wait():
    damage = 350  # ROLLED_BACK has undone the steps up to 300
    run = healthy_run(damage)
    run.record.ledger.rollbacks.append(ROLLED_BACK)
    train_damaged(run)
    assert run.step > damage + TO_VERDICT
    assert run.assessments == ["worse"]


# -- what the verdict says of the onset ------------------------------------------------------------


def test_the_trouble_begins_at_its_first_alarm_and_its_rate_is_not_healthy():
    # The rate is healthy up to step 245, also that of the first anchor.
    run = ToyRun(noisy)
    run.driver.rate = 0.25
    run.witness.state.anchors.clear()
    run.witness.add_anchor(0, run.restorable)
    train_healthy(run, 246)

    # A higher rate brings alarms, and only four steps later worse weights.
    run.driver.rate = 8.0
    for _ in range(4):
        run.take(run.step, alarm=True)
    verdict = train_damaged(run)

    assert verdict.onset == 246
    assert run.record.healthy.rates["optimizer"].high == 0.25


def test_the_onset_reaches_back_over_the_gaps_of_a_burst():
    """The first sign was ten steps before the first comparison with evidence."""
    run = healthy_run(DAMAGE)
    run.take(run.step, weight=run.driver.weight, alarm=True)
    for _ in range(9):
        run.take(run.step, weight=run.driver.weight)
    assert train_damaged(run).onset == DAMAGE


# -- the end of the data ---------------------------------------------------------------------------


@pytest.mark.parametrize("harmed", [1.0, 0.7], ids=["each batch is worse", "most are"])
@pytest.mark.parametrize("won", [3, AGAIN + 1], ids=["little evidence", "strong evidence"])
def test_at_the_end_of_the_data_the_kept_batches_decide(won, harmed):
    """All of them have to be worse after three comparisons, most of them with strong evidence.

    `won` is the number of comparisons that the earlier weights have won, and `harmed` the share of
    the kept batches on which the damaged weights are worse.
    """

    def loss(weight: float, batch: int) -> float:
        is_kept = batch < DAMAGE
        if is_kept and random.Random(batch).random() >= harmed:
            return (10.0 - weight) / 20  # a little better with the damaged weights
        return noisy(weight, batch)

    # The weights are damaged, and the data ends before there is a verdict.
    run = healthy_run(DAMAGE, loss)
    level = run.driver.weight + 5.0
    while max(anchor.evidence for anchor in run.witness.state.anchors) < (1 + STAKE) ** won:
        assert run.take(run.step, weight=level, alarm=True) is None

    verdict = run.witness.decide_at_end()

    has_strong_evidence = won > 3
    assert (verdict is not None) == (harmed == 1.0 or has_strong_evidence)
