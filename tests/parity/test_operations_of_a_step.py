"""How many operations healcore adds to a step, against committed numbers; never time.

A number that grows by more than a tenth is a regression. One that falls by more than a fifth has to
be committed here, so that the next regression is seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
import torch

from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.jax import namespace
from healcore.policy import engine_of
from healcore.torch import attach
from tests.torch.sync_counter import CountSyncs


class Counts(NamedTuple):
    """Operations of one step under one policy."""

    equations: int
    """Primitives in the jaxpr of the engine."""
    dispatches: int
    """Operations that torch dispatches in an eager `optimizer.step()` with the device engine."""


COUNTS = {
    "default": Counts(177, 120),
    "conservative": Counts(752, 593),
    "pretraining": Counts(928, 741),
    "zclip": Counts(217, 186),
}
"""With jax 0.10.2 and torch 2.13.0."""


def assert_near(found: int, committed: int) -> None:
    assert 0.8 * committed <= found <= 1.1 * committed, f"{found}, committed {committed}"


def equations(jaxpr: Any) -> int:
    """Primitives of a jaxpr, with those of the calls in it."""
    total = 0
    for each in jaxpr.eqns:
        inner = [value for value in each.params.values() if hasattr(value, "eqns")]
        total += sum(map(equations, inner)) if inner else 1
    return total


def equations_of(engine: Any) -> int:
    one = jnp.float32(1)
    signals = Signals(loss=one, grad_norm=one, learning_rate=one if engine.limits_lr else None)
    step = jax.make_jaxpr(lambda *each: engine.step(*each, xp=namespace))
    return equations(step(map_leaves(jnp.asarray, engine.init()), signals).jaxpr)


@pytest.mark.parametrize("preset", COUNTS)
def test_equations_of_the_engine(preset: str):
    assert_near(equations_of(engine_of(preset)), COUNTS[preset].equations)


@pytest.mark.parametrize("preset", COUNTS)
def test_dispatches_of_the_device_engine(preset: str):
    """And no read of a value by the host."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    heal = attach(optimizer, preset, engine="device", compile=False)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        heal.observe(loss)
        optimizer.zero_grad()
        loss.backward()
        with CountSyncs() as found:
            optimizer.step()
    assert_near(found.operations, COUNTS[preset].dispatches)
    assert found.count == 0
