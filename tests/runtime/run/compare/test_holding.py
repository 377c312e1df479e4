"""What was unusual at the onset of damage, and the steps that are frozen when it is repeated."""

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.healthy_ranges import Held, HeldNorm
from tests.runtime.run.compare.toy_driver import (
    ToyRun,
    healthy_run,
    healthy_weight,
    noisy,
    train_damaged,
)


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
        verdict = run.take(run.step, weight=level, alarm=True, norm=norm)

    assert run.holding.unusual_batches(verdict) == extraordinary
    unusual_norms = run.holding.outside_ranges(verdict).norms
    assert unusual_norms == {"optimizer": HeldNorm(1.0, 4.0)}, "the healthy and the largest norm"


def test_frozen_steps_end_although_the_loss_fn_has_failed():
    run = healthy_run(250)
    run.comparisons.state.ranges.held = Held(frozen_steps=(251, 255))
    frozen = []
    for step in range(250, 258):
        if run.holding.freezing_changes(step):
            run.holding.update_freezing(step)
        if run.holding.freezes:
            frozen.append(step)
        if step == 252:
            run.comparisons.loss_function.drop()
    assert frozen == [251, 252, 253, 254, 255]


def test_a_number_that_was_learnt_after_the_better_weights_counts_as_outside():
    """The momentum is wrong from step 260 on, and the loss shows it from step 310 on."""
    right, wrong = NumberRange(0.9, 0.9, 0.9), NumberRange(0.9, 1.1, 1.1)
    run = ToyRun(noisy)
    for step in range(310):
        run.driver.set = {"optimizer.momentum": wrong if step >= 260 else right}
        run.take(step, weight=healthy_weight(step))
    assert run.comparisons.state.ranges.values.numbers["optimizer.momentum"].high == 1.1

    # The checkpoint of step 300 was healthy, so that 1.1 seems to be healthy too.
    verdict = train_damaged(run)
    assert verdict.anchor_step == 300
    assert not run.holding.outside_ranges(verdict).numbers

    # Of the weights of step 200 it is known that 0.9 was healthy.
    verdicts = {each.anchor_step: each for each in run.comparisons.about_older_weights(verdict)}
    (held,) = run.holding.outside_ranges(verdicts[200]).numbers.values()
    assert (held.bounds.last, held.program_value) == (0.9, 1.1)
