"""A Flax linen loop that goes back by itself: the lines that healcore adds are marked.

Twelve batches in a row are ruined. The first ones are skipped; at the tenth the run goes back to a
checkpoint that is known to be good, dropout key and all, halves its learning rate, and leaves the
bad batches out.

python examples/linen_healer.py [DIRECTORY]
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
from flax.training.train_state import TrainState

import healcore  # <- healcore

STEPS, BATCH = 400, 64
RUINED = range(250, 262)


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(index).standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets * np.float32("nan") if index in RUINED else targets


class Model(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        x = nn.tanh(nn.Dense(32)(x))
        return nn.Dense(1)(nn.Dropout(0.1, deterministic=not train)(x))


class State(TrainState):
    key: jax.Array


# With BatchNorm, or to have the loss judged too and not the gradients alone, derive State from
# healcore.jax.flax_linen.HealTrainState: its apply_gradients takes value=loss, and a skipped step
# leaves the running statistics as they were.
@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, inputs: Any, targets: Any) -> State:
    key, dropout = jax.random.split(state.key)

    def loss_fn(params: Any) -> jax.Array:
        outputs = state.apply_fn({"params": params}, inputs, train=True, rngs={"dropout": dropout})
        return jnp.mean((outputs - targets) ** 2)

    return state.apply_gradients(grads=jax.grad(loss_fn)(state.params), key=key)


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    # A list can be put back to any batch, and so can a Grain iterator.
    loader = [batch(index) for index in range(STEPS)]
    model = Model()
    params = model.init(jax.random.key(0), loader[0][0], train=False)["params"]
    tx = optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS))
    tx = healcore.jax.protect(tx, "default")  # <- healcore
    state = State.create(apply_fn=model.apply, tx=tx, params=params, key=jax.random.key(1))
    with healcore.Healer("default", state=state, store=directory) as healer:  # <- healcore
        for x, y in healer.batches(loader):  # <- healcore
            healer.update(train_step(healer.state, x, y))  # <- healcore
    x, y = batch(STEPS)
    outputs = model.apply({"params": healer.state.params}, x, train=False)
    loss = jnp.mean((outputs - y) ** 2).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
