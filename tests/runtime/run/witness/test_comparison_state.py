"""What a restart continues with: the evidence, the usual losses and norms, and the credit."""

import json
import math
from dataclasses import asdict

import pytest
from pydantic import TypeAdapter

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.trouble import Trouble
from healcore.runtime.run.witness.evidence import ComparisonState
from tests.runtime.run.witness.toy_driver import (
    ToyRun,
    healthy_weight,
    noisy,
    train_damaged,
    train_healthy,
)


def through_json(state: ComparisonState) -> ComparisonState:
    """What a checkpoint's record keeps of the state."""
    text = json.dumps(asdict(state))
    return TypeAdapter(ComparisonState).validate_json(text, strict=True)


def restarted(run: ToyRun) -> ToyRun:
    """A run in a new process that continues from what a checkpoint keeps."""
    saved = through_json(run.witness.state)
    weights = {anchor.step: anchor.weights for anchor in run.witness.state.anchors}

    other = ToyRun(run.loss_fn, interval=run.interval)
    other.step, other.driver.weight = run.step, run.driver.weight
    other.record.healthy = run.record.healthy
    other.witness.continue_from(saved, run.step, weights)
    return other


def train_until(run: ToyRun, end: int, damage: int = 250) -> Trouble | None:
    """Trains up to the verdict, and returns it; or up to step `end`.

    Losses are usual until the step `damage`; from then on the weights are damaged.
    """
    while run.step < end:
        weight = healthy_weight(run.step)
        if run.step >= damage:
            weight += 5.0
        verdict = run.take(run.step, weight=weight, norm=1.0)
        if verdict is not None:
            return verdict
    return None


def test_numbers_that_are_not_finite_can_be_saved():
    """A save that raises loses the run's work."""
    run = ToyRun(noisy)
    run.driver.rate = math.nan
    run.driver.set["momentum"] = NumberRange(-math.inf, math.inf, 0.9)
    train_healthy(run, 250)
    assert train_damaged(run, 10) is None
    assert run.witness.state.has_evidence

    state = run.witness.state
    read = through_json(state)

    assert read == state


@pytest.mark.parametrize("steps", [100, 130, 250, 255, 262, 275, 301])
def test_a_restart_finds_damage_soon_after_the_run_that_is_not_restarted(steps):
    undisturbed = ToyRun(noisy)
    assert train_until(undisturbed, steps) is None
    again = restarted(undisturbed)

    expected = train_until(undisturbed, 400)
    found = train_until(again, 400)

    assert expected is not None
    assert found is not None
    assert found.better_step == expected.better_step
    assert abs(again.step - undisturbed.step) <= 5


def test_a_restart_knows_the_usual_losses_and_norms():
    """Otherwise no loss and no norm of its first steps could be a sign of trouble."""
    for loss, norm in ((50.0, 1.0), (None, 9.0)):
        run = ToyRun(noisy)
        for _ in range(150):
            run.take(run.step, weight=1.0, norm=1.0)
        again = restarted(run)
        again.take(again.step, weight=1.0, norm=1.0)
        before = again.driver.evaluations
        again.take(again.step, weight=1.0, norm=1.0)
        assert again.driver.evaluations == before
        again.take(again.step, weight=1.0, loss=loss, norm=norm)
        assert again.driver.evaluations > before


def test_a_restart_has_the_credit_that_is_left():
    """With a full credit it would evaluate more often than the run that is not restarted."""
    run = ToyRun(noisy)
    assert train_until(run, 262) is None
    assert run.witness.state.spent > 0.0
    assert restarted(run).witness.state.spent == run.witness.state.spent
