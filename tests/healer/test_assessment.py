"""The assessor alone: what it evaluates, with which weights, and what it answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from healcore.core.engine import neutral
from healcore.core.verdict import Cause
from healcore.runtime.driver import Told
from healcore.runtime.incidents.assessment import Assessor, Finding


class Weights:
    """A model in which each batch has the loss that is said here."""

    def __init__(self) -> None:
        self.now: dict[Any, float] = {}

    def loss_of(self, loss_fn: Any, batch: Any) -> float:
        return loss_fn(self.now[batch])


def told(loss: float, cause: int = 0) -> list[Told]:
    decision = neutral()._replace(cause=np.int32(cause))
    return [Told("model", 0, decision, 0, 0, bool(cause), loss, 1.0, 0.0, 0.0, 0.0)]


def asked(now: dict[str, float], loss: float) -> Finding:
    """Two remembered batches, `a` of loss 1 and `b` of 3; then an alarm at `new`."""
    weights = Weights()
    assessor = Assessor(weights, lambda loss: loss, print)  # type: ignore[arg-type]
    for index, (batch, before) in enumerate((("a", 1.0), ("b", 3.0))):
        assessor.see(16 * index, batch, told(before))
    weights.now = now
    assessor.see(40, "new", told(loss, Cause.LOSS_SPIKE))
    assert assessor._asked is not None
    return assessor._asked


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ({"a": 1.0, "b": 3.0, "new": 12.0}, "data"),
        ({"a": 11.0, "b": 13.0, "new": 12.0}, "damage"),
        ({"a": 5.9, "b": 7.9, "new": 12.0}, "data"),  # below half of the step's rise
        ({"a": 6.1, "b": 8.1, "new": 12.0}, "damage"),
        ({"a": 20.9, "b": 22.9, "new": 12.0}, "damage"),
        ({"a": 21.1, "b": 23.1, "new": 12.0}, "data"),  # above twice: forgotten, not broken
        ({"a": 1.0, "b": 23.0, "new": 12.0}, "data"),  # one domain of two
        ({"a": math.nan, "b": 3.0, "new": 12.0}, "damage"),
    ],
)
def test_the_parts_of_the_rise(now, verdict):
    assert asked(now, loss=12.0).verdict.value == verdict


def test_all_losses_are_those_of_the_present_weights():
    """Where a model breaks they change by orders of magnitude until the alarm has arrived."""
    found = asked({"a": 20_000.0, "b": 24_000.0, "new": 25_000.0}, loss=150_000.0)
    assert found.verdict.value == "damage"
    assert found.rise == 25_000.0 - 2.0
    assert found.rise_remembered == 22_000.0 - 2.0
