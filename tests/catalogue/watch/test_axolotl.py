"""Axolotl's loss watchdog and its port, on transformers' own callback classes.

With `logging_steps = 1` the two stop at the same loss on every finite curve (the original is asked
before the step is logged, and so reports it one step later).
"""

from __future__ import annotations

import pytest

from healcore.core.verdict import Action
from healcore.policy import load
from tests.catalogue.watch import curves

pytest.importorskip("transformers", reason="transformers is not installed")
originals = pytest.importorskip("tests.catalogue.watch.originals")

NAME = "axolotl-watchdog"
SYNTHETIC = curves.synthetic()


def stopped(name, threshold):
    """The step of a synthetic curve whose loss makes the port stop, or None."""
    policy = load(NAME, detect={"loss_ceiling": {"ceiling": threshold}})
    return curves.first(curves.decisions_of(policy, SYNTHETIC[name]).orders(Action.STOP))


@pytest.mark.parametrize("threshold", [2.2, 3.0, 5.0])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_step(name, threshold):
    losses = [*SYNTHETIC[name], SYNTHETIC[name][-1]]
    asked = curves.first(originals.watched(losses, threshold=threshold))  # one step later
    assert stopped(name, threshold) == (None if asked is None else asked - 1)
