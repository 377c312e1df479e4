"""Steps without `jit`, and steps that were compiled or serialized ahead of time."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore.core.engine import Engine
from healcore.jax import heal_zclip, last_decision, protect, scale_by_heal_lr
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

PARAMS = {"w": jnp.ones((2, 3)), "n": jnp.asarray([7], jnp.int32), "b": jnp.ones(3, jnp.bfloat16)}
SIZES = [1.0, 1.1, 0.9, 50.0, np.nan, 1.0]
RESETS = policies.CUT_LR._replace(lr=policies.CUT_LR.lr._replace(reset_moments=True))
OPTIMIZERS: dict[str, Any] = {
    "reset": protect(optax.adamw(0.1), RESETS),
    "adagc": protect(optax.sgd(0.1), policies.ADAGC._replace(max_skips=7)),
    "scheduled": optax.inject_hyperparams(heal_zclip)(z_threshold=lambda step: 2.0 + step),
}


def steps(tx: Any, update: Any) -> tuple[Any, Any]:
    """Updates and state after gradients of several sizes, one of them NaN."""
    state, updates = tx.init(PARAMS), None
    for size in SIZES:
        grads = jax.tree.map(lambda p, size=size: p if p.dtype == jnp.int32 else p * size, PARAMS)
        updates, state = update(grads, state, PARAMS, value=jnp.float32(1.0))
    return updates, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_engine_is_one_compiled_call(name, monkeypatch):
    tx = OPTIMIZERS[name]
    calls, step = [], Engine.step
    monkeypatch.setattr(
        Engine, "step", lambda self, *args, **xp: calls.append(1) or step(self, *args, **xp)
    )
    eager = steps(tx, tx.update)
    assert len(calls) <= 1  # to trace it, where no other test has
    compiled = steps(tx, jax.jit(tx.update))
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-5)


@pytest.mark.parametrize("how", ["compiled", "serialized"])
def test_a_step_prepared_ahead_of_time_makes_the_same_bits(how):
    tx = optax.chain(protect(optax.sgd(0.1), policies.CUT_LR), scale_by_heal_lr())

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return optax.apply_updates(params, updates), state, last_decision(state)

    params = {"w": jnp.ones((2, 3))}
    ours = theirs = (params, tx.init(params))
    shapes = jax.eval_shape(lambda: (*ours, params))
    if how == "compiled":
        prepared: Any = step.lower(*shapes).compile()
    else:
        pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
        jax.export.register_namedtuple_serialization(optax.EmptyState, serialized_name="EmptyState")
        prepared = jax.export.deserialize(jax.export.export(step)(*shapes).serialize()).call
    for size in SIZES:
        grads = jax.tree.map(lambda p, size=size: p * size, params)
        *ours, made = step(*ours, grads)
        *theirs, read = prepared(*theirs, grads)
        assert_same_bits((ours, made), (theirs, read))
