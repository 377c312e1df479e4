"""A Flax linen loop that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the parameters get worse. The Healer
restores earlier parameters, with their dropout key, and limits the learning rate, which
`inject_hyperparams` shows it. Without healcore it ends as NaN. python examples/linen_healer.py
"""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore  # <- healcore
from healcore.jax.flax_linen import HealTrainState  # <- healcore

STEPS, BATCH = 400, 64


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets + 0.1 * rng.standard_normal((BATCH, 1), np.float32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x))))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))


class State(HealTrainState):  # <- healcore
    key: jax.Array


def loss_of(params: Any, state: State, dropout: jax.Array, inputs: Any, targets: Any) -> jax.Array:
    outputs = state.apply_fn({"params": params}, inputs, train=True, rngs={"dropout": dropout})
    return jnp.mean((outputs - targets) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, inputs: Any, targets: Any) -> State:
    key, dropout = jax.random.split(state.key)
    loss, grads = jax.value_and_grad(loss_of)(state.params, state, dropout, inputs, targets)
    return state.apply_gradients(grads=grads, value=loss, key=key)  # <- healcore


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    # A list can be put back to any batch, and so can a Grain iterator.
    loader = [batch(index) for index in range(STEPS)]
    model = Model()
    params = model.init(jax.random.key(0), loader[0][0], train=False)["params"]
    rate = optax.linear_schedule(0.01, 2.0, 300)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)
    tx = healcore.jax.protect(tx, "default")  # <- healcore
    state = State.create(apply_fn=model.apply, tx=tx, params=params, key=jax.random.key(1))
    evaluate = jax.jit(lambda state, batch: loss_of(state.params, state, state.key, *batch))
    options = {"state": state, "store": directory, "loss_fn": evaluate}
    with healcore.Healer("default", **options) as healer:  # <- healcore
        for x, y in healer.batches(loader):  # <- healcore
            healer.update(train_step(healer.state, x, y))  # <- healcore
    x, y = batch(STEPS)
    loss = jnp.mean((model.apply({"params": healer.state.params}, x, train=False) - y) ** 2).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else folder)
