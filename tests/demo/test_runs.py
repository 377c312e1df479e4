"""What is recorded of a run, and what is read from it."""

from __future__ import annotations

import math

import numpy as np

from healcore.demo.runs import DemoRun, Step, number, shortened
from healcore.policy import load


def test_numbers_are_on_the_host_at_the_end():
    run = DemoRun("torch", "healed", steps=[Step(0, 0, np.float32(2), np.float32(1))])
    run.finish(np.float32(2.5))
    assert run.steps == [Step(0, 0, 2.0, 1.0)]
    assert type(run.steps[0].loss) is float
    assert run.held_out_loss == 2.5


def test_the_mean_loss_is_of_the_steps_before_a_batch():
    run = DemoRun("torch", "unprotected")
    run.steps = [Step(step, step, 3.0 if step < 5 else 2.0, 1.0) for step in range(30)]
    run.steps[28] = Step(28, 28, math.nan, 1.0)
    assert run.mean_loss(until=10, over=5) == 2.0
    assert run.mean_loss(until=10) == 2.5
    assert math.isnan(run.mean_loss(until=30))


def test_undone_steps_do_not_count():
    run = DemoRun("torch", "healed")
    # 0 to 5, back to 3, to 4 without batches 4 and 5, back to 1 and to the end.
    taken = [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (3, 3), (4, 6), (1, 1), (2, 2)]
    run.steps = [Step(step, batch, float(row), 1.0) for row, (step, batch) in enumerate(taken)]
    assert run.mean_loss(until=10, over=2) == 8.5  # rows 8 and 9
    assert run.mean_loss(until=10) == 17 / 3  # and row 0


def test_only_the_probation_of_a_policy_is_changed():
    policy = load("default")
    assert shortened(policy).rollback.probation == 20
    back = {"rollback": policy.rollback}
    assert shortened(policy).model_copy(update=back) == policy


def test_a_loss_in_a_few_characters():
    losses = (2.157, 999.0, 8.4e10, math.inf, math.nan)
    assert [number(loss) for loss in losses] == ["2.16", "999.00", "8e+10", "inf", "NaN"]
