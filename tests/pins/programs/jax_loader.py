"""A loop in JAX over a list of batches, with a key for its dropout in the state."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore.jax
from healcore import Healer
from tests.pins.programs.interruptions import POLICY, RUN, Run, main


@cache
def transformation() -> Any:
    return healcore.jax.protect(optax.adamw(optax.cosine_decay_schedule(1e-2, 100)), POLICY)


def initial_state() -> Any:
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "first": jax.random.normal(keys[0], (4, 8)) / 2,
        "last": jax.random.normal(keys[1], (8, 1)) / 3,
    }
    opt_state = transformation().init(params)
    return {"params": params, "opt_state": opt_state, "key": jax.random.key_data(keys[2])}


def loss_of(params: Any, drop: jax.Array, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["first"])
    hidden = hidden * jax.random.bernoulli(drop, 0.8, hidden.shape) / 0.8
    return jnp.mean((hidden @ params["last"] - targets) ** 2)


def step_of(state: Any, inputs: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    """One step, as a program compiles it."""
    key, drop = jax.random.split(jax.random.wrap_key_data(state["key"]))
    loss, grads = jax.value_and_grad(loss_of)(state["params"], drop, inputs, targets)
    updates, opt_state = transformation().update(
        grads, state["opt_state"], state["params"], value=loss
    )
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": jax.random.key_data(key)}, loss


compiled_step = cache(lambda: jax.jit(step_of))


@cache
def compiled_loss() -> Any:
    drop = jax.random.key(1)
    return jax.jit(lambda state, batch: loss_of(state["params"], drop, batch[1], batch[2]))


def table() -> list[Any]:
    made = np.random.default_rng(1)
    inputs = made.normal(size=(48, 4, 4)).astype(np.float32)
    targets = np.tanh(inputs.sum(2, keepdims=True))
    return [[number, inputs[number], targets[number]] for number in range(48)]


def damaged(state: Any) -> Any:
    """What a faulty device may do: the weights of a layer are NaN."""
    return {**state, "params": jax.tree.map(lambda leaf: leaf * jnp.nan, state["params"])}


def arrays_of(state: Any) -> dict[str, Any]:
    """All that a step changes, without the state of `protect`."""
    inner = state["opt_state"].inner_state
    leaves = jax.tree_util.tree_leaves_with_path((state["params"], inner, state["key"]))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def train(run: Run) -> None:
    with Healer(
        POLICY, state=initial_state(), store=run.store, loss_fn=compiled_loss(), **RUN
    ) as healer:
        for number, inputs, targets in healer.batches(table()):
            step = healer.step
            kind = run.interrupt("before", step)
            if kind == "break":
                return
            given = damaged(healer.state) if kind == "damage" else healer.state
            state, loss = compiled_step()(given, inputs, targets)
            run.trained(step, number, float(loss))
            kind = run.interrupt("after", step)
            healer.update(damaged(state) if kind == "damage" else state)
            if kind == "break":
                return
    run.ended(healer.step, arrays_of(healer.state))


if __name__ == "__main__":
    main(train)
