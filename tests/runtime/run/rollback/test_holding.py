"""What was unusual at a trouble, what is held, and when it ends; the steps that are frozen."""

import math

import pytest

from healcore.runtime.data import BatchId
from healcore.runtime.driver import NumberRange
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.envelope import Envelope, Held
from healcore.runtime.run.rollback.holding import LASTING_STEPS
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from tests.healer.step_records import record
from tests.runtime.run.witness.toy_driver import (
    ToyRun,
    healthy_run,
    healthy_weight,
    noisy,
    train_damaged,
)

NAME = "optimizer.weight_decay"


def rolled_back_at(run: ToyRun, step: int) -> None:
    """Adds a rollback that began at a step."""
    trouble = Trouble(onset=step, found_at=step, since=step)
    run.record.ledger.add_rollback(RollbackRecord(trouble=trouble, step=step))


def constant(value: float) -> NumberRange:
    return NumberRange(value, value, value)


def test_batches_and_norms_at_the_onset_that_are_unusual():
    # The earlier weights find three batches extraordinary, and one step has a larger norm.
    extraordinary = [250, 251, 252]

    def loss(weight: float, batch: int) -> float:
        if batch in extraordinary:
            return noisy(weight, batch) + 50.0
        return noisy(weight, batch)

    run = ToyRun(loss)
    for step in range(250):
        run.take(step, weight=healthy_weight(step), norm=1.0)

    level, verdict = run.driver.weight + 5.0, None
    while verdict is None:
        norm = 4.0 if run.step == 255 else 2.0
        batches = (BatchId(0, run.step),)
        run.record.journal.add(StepResult(run.step, [record()], batches), kept=500)
        verdict = run.take(run.step, weight=level, alarm=True, norm=norm)

    found = run.holding.outside(verdict, verdict.better_step or 0, run.record.healthy)
    assert [index for _, index in found.left_out] == extraordinary
    assert found.norms == {"optimizer": 1.0}, "the healthy norm"


def test_frozen_steps_end_although_the_loss_fn_has_failed():
    run = healthy_run(250)
    run.holding.hold(Envelope(frozen=(251, 255)), 250)
    frozen = []
    for step in range(250, 258):
        if run.holding.envelope.freezes(step) != run.holding.freezes:
            run.holding.hold(run.holding.envelope, step)
        if run.holding.freezes:
            frozen.append(step)
        if step == 252:
            run.witness.loss_function.drop("")
    assert frozen == [251, 252, 253, 254, 255]


def test_a_number_that_was_learnt_after_the_better_weights_counts_as_outside():
    """The momentum is wrong from step 260 on, and the loss shows it from step 310 on."""
    right, wrong = NumberRange(0.9, 0.9, 0.9), NumberRange(0.9, 1.1, 1.1)
    run, at_200 = ToyRun(noisy), None
    for step in range(310):
        run.driver.set = {"optimizer.momentum": wrong if step >= 260 else right}
        run.take(step, weight=healthy_weight(step))
        if step == 200:
            at_200 = run.record.healthy
    assert run.record.healthy.numbers["optimizer.momentum"].high == 1.1

    # The checkpoint of step 300 was healthy, so that 1.1 seems to be healthy too.
    trouble = train_damaged(run)
    assert run.witness.better_steps(trouble)[:2] == [300, 200]
    assert not run.holding.outside(trouble, 300, run.record.healthy).numbers

    # Of the weights of step 200 it is known that 0.9 was healthy.
    assert at_200 is not None
    (held,) = run.holding.outside(trouble, 200, at_200).numbers.values()
    assert (held.bounds.last, held.outside) == (0.9, 1.1)


def test_a_held_number_is_not_learnt_and_is_released_when_the_program_sets_a_healthy_value():
    run, wrong = healthy_run(1), NumberRange(0.05, 100.0, 100.0)
    run.driver.set = {NAME: constant(0.05)}
    run.holding.learn(100)
    run.holding.hold(Envelope(numbers={NAME: Held(constant(0.05), 100.0)}), 100)
    rolled_back_at(run, 250)
    assert run.driver.held == {NAME: constant(0.05)}
    run.holding.learn(200)
    assert run.driver.held, "the fault is still to come"
    run.driver.set = {NAME: wrong}
    run.holding.learn(300)
    assert run.driver.held
    assert run.record.healthy.numbers[NAME].high == 0.05
    run.driver.set = {NAME: NumberRange(0.05, 100.0, 0.05)}
    run.holding.learn(400)
    assert not run.driver.held
    assert not run.holding.envelope


@pytest.mark.parametrize("at_end", [False, True])
def test_a_number_that_the_program_keeps_outside_for_long_is_intended(at_end):
    """The repeat looks better for as long as it is held: a regulariser costs training loss."""
    run = healthy_run(1)
    held = {"w": Held(constant(0.0), 3.0), "b": Held(constant(0.9), None)}
    run.holding.hold(Envelope(numbers=held), 700)
    rolled_back_at(run, 720)
    run.driver.set = {"w": constant(3.0), "b": constant(math.nan)}
    early = run.holding.intended(720 + LASTING_STEPS - 1, at_end=at_end)
    assert early == ({"w": 3.0} if at_end else {}), "a fault may last as long"
    assert run.holding.intended(720 + LASTING_STEPS) == {"w": 3.0}, "NaN is never intended"


def test_a_guessed_ceiling_of_the_rate_ends_at_the_first_healthy_checkpoint():
    run = healthy_run(1)
    run.holding.hold(Envelope(is_guess=True), 0)
    rolled_back_at(run, 40)
    run.holding.learn(40)
    assert run.holding.envelope.is_guess, "the trouble is still to come"
    run.holding.learn(100)
    assert not run.holding.envelope.is_guess
