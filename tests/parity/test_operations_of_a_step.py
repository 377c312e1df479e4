"""How many operations healcore adds to a step, against committed numbers; never time.

A number that grows by more than a tenth is a regression. One that falls by more than a fifth has to
be committed here, so that the next regression is seen.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from healcore.core.signals import Signals
from healcore.core.trees import map_leaves
from healcore.jax import protect
from healcore.policy import engine_of
from healcore.torch import attach
from tests.torch.sync_counter import CountSyncs

COUNTS = {
    "default": (305, 15),
    "conservative": (848, 715),
    "pretraining": (1018, 887),
    "zclip": (298, 266),
}
"""Primitives in the jaxpr of the engine (jax 0.10.2), and operations that torch (2.13.0) dispatches
in an eager `optimizer.step()` with the device engine. 14 primitives are of the limit of the norm,
which torch's step only has while there is one."""


def equations(jaxpr: Any) -> int:
    """Primitives of a jaxpr, with those of the calls in it."""
    total = 0
    for each in jaxpr.eqns:
        inner = [value for value in each.params.values() if hasattr(value, "eqns")]
        total += sum(map(equations, inner)) if inner else 1
    return total


@pytest.mark.parametrize("preset", COUNTS)
def test_the_engine_has_the_committed_number_of_equations(preset: str):
    engine = engine_of(preset)
    one = jnp.float32(1)
    rate = one if engine.limits_lr else None
    step = engine.step
    signals = Signals(loss=one, grad_norm=one, learning_rate=rate)
    found = equations(jax.make_jaxpr(step)(map_leaves(jnp.asarray, engine.init()), signals).jaxpr)
    committed = COUNTS[preset][0]
    assert 0.8 * committed <= found <= 1.1 * committed, found


STEPS = {"default": 668, "pretraining": 1624, "zclip": 649}
"""Primitives that `protect(optax.adamw(...), preset)` adds to AdamW's own 43, for two tensors."""


@pytest.mark.parametrize("preset", STEPS)
def test_a_protected_step_has_the_committed_number_of_equations(preset: str):
    params = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}

    def count(tx: optax.GradientTransformation) -> int:
        update = optax.with_extra_args_support(tx).update
        step = functools.partial(update, value=jnp.float32(1))
        return equations(jax.make_jaxpr(step)(params, tx.init(params), params).jaxpr)

    found = count(protect(optax.adamw(1e-3), preset)) - count(optax.adamw(1e-3))
    assert 0.8 * STEPS[preset] <= found <= 1.1 * STEPS[preset], found


def test_the_healing_state_of_default_is_four_arrays():
    """Each array costs a jitted step 2 to 5 us."""
    state = protect(optax.sgd(0.1), "default").init({"w": jnp.ones(3)})
    assert len(jax.tree.leaves(state)) == 4


@pytest.mark.parametrize("preset", COUNTS)
def test_the_device_engine_has_the_committed_number_of_dispatches(preset: str):
    """The host reads no value."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    heal = attach(optimizer, preset, engine="device")
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        heal.observe(loss)
        optimizer.zero_grad()
        loss.backward()
        with CountSyncs() as found:
            optimizer.step()
    committed = COUNTS[preset][1]
    assert 0.8 * committed <= found.operations <= 1.1 * committed, found.operations
    assert found.count == 0
