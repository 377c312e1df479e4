"""Axolotl's loss watchdog and its port, on transformers' own callback classes.

With `logging_steps = 1` the two stop at the same loss on every finite curve (the original is asked
before the step is logged, and so reports it one step later). What differs has a test of its own.
"""

from __future__ import annotations

import functools

import pytest

from healcore.core.verdict import Action
from healcore.policy import load
from tests.catalogue.watch import curves

pytest.importorskip("transformers", reason="transformers is not installed")
originals = pytest.importorskip("tests.catalogue.watch.originals")

NAME = "axolotl-watchdog"
SYNTHETIC = curves.synthetic()


def stopped(losses, threshold=5.0):
    """The step whose loss makes the port stop, or None."""
    policy = load(NAME, detect={"loss_ceiling": {"ceiling": threshold}})
    decisions = curves.decisions_of(policy, losses)
    return curves.first(decisions.orders(Action.STOP))


@functools.cache
def stopped_on(name, threshold):
    """The same on a synthetic curve."""
    return stopped(SYNTHETIC[name], threshold)


def asked(losses, threshold=5.0, **options):
    """The step whose loss makes the original stop; it reports this at the next."""
    losses = [*losses, losses[-1]]
    first = curves.first(originals.watched(losses, threshold=threshold, **options))
    return None if first is None else first - 1


@pytest.mark.parametrize("threshold", [2.2, 3.0, 5.0])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_same_step(name, threshold):
    assert stopped_on(name, threshold) == asked(SYNTHETIC[name], threshold)
