"""What a restart continues with: the same comparisons, and the credit that is left."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter

from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.store.packed_values import PackedValues
from tests.runtime.run.compare.toy_driver import (
    ToyRun,
    healthy_weight,
    noisy,
    train_damaged,
    train_healthy,
)

CHECKS = 3
"""Calls by which a new process checks the `loss_fn`."""


def through_json(state: ComparisonState) -> ComparisonState:
    """What a checkpoint's record keeps of the state: JSON has no NaN."""
    text = json.dumps(asdict(state), allow_nan=False)
    return TypeAdapter(ComparisonState).validate_json(text, strict=True)


def restarted(run: ToyRun) -> ToyRun:
    """A run in a new process that continues from what a checkpoint keeps."""
    saved = through_json(run.comparisons.to_save())
    packed = run.comparisons.batches_to_save()
    assert packed is not None
    batches = PackedValues.read(packed.state())
    weights = {anchor.step: anchor.weights for anchor in run.comparisons.anchors}

    other = ToyRun(run.loss_fn, interval=run.interval)
    other.step, other.driver.weight = run.step, run.driver.weight
    other.comparisons.continue_from(saved, weights, step=run.step, batches=batches)
    return other


def train_until(run: ToyRun, end: int, damage: int = 250) -> Any:
    """Trains up to the verdict, and returns it with the unusual batches; or up to step `end`.

    Losses and norms are usual until the step `damage`; from then on the weights are damaged.
    """
    while run.step < end:
        weight, norm = healthy_weight(run.step), 1.0
        if run.step >= damage:
            weight, norm = weight + 5.0, 4.0
        verdict = run.take(run.step, weight=weight, norm=norm)
        if verdict is not None:
            return verdict, run.holding.unusual_batches(verdict)
    return None


def test_a_rate_that_is_not_finite_can_be_saved():
    """JSON has no such numbers, and a save that raises loses the run's work."""
    run = ToyRun(noisy)
    run.driver.rate = math.nan
    train_healthy(run, 250)
    assert train_damaged(run, 10) is None
    assert run.comparisons.has_evidence

    read = through_json(run.comparisons.state)

    assert read == run.comparisons.state
    for anchor in read.anchors:
        assert anchor.draw(1) == [], "its batches are saved elsewhere"


@pytest.mark.parametrize("steps", [100, 130, 250, 255, 262, 275, 301])
def test_a_restart_compares_as_the_run_that_is_not_restarted(steps):
    undisturbed = ToyRun(noisy)
    assert train_until(undisturbed, steps) is None
    again = restarted(undisturbed)
    before = undisturbed.driver.evaluations, again.driver.evaluations

    expected = train_until(undisturbed, 400)
    found = train_until(again, 400)

    assert expected is not None
    assert found == expected
    evaluations = undisturbed.driver.evaluations - before[0]
    evaluations_again = again.driver.evaluations - before[1] - CHECKS
    assert evaluations_again == evaluations, "the same comparisons"


def test_a_restart_has_the_credit_that_is_left():
    """With a full credit it would evaluate more often than the run that is not restarted."""
    run = ToyRun(noisy)
    full = run.comparisons.to_save().credit
    assert full is not None

    assert train_until(run, 262) is None
    left = run.comparisons.to_save().credit
    assert left is not None
    assert left < full

    assert restarted(run).comparisons.to_save().credit == left
