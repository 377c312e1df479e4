"""A Flax nnx loop that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the parameters get worse. The Healer
restores earlier parameters, with their dropout keys, and limits the learning rate, which
`inject_hyperparams` shows it. Without healcore it ends as NaN. python examples/nnx_healer.py [DIR]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import healcore  # <- healcore
from healcore.jax import flax_nnx  # <- healcore

STEPS, BATCH = 400, 64


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets + 0.1 * rng.standard_normal((BATCH, 1), np.float32)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 64, rngs=rngs)
        self.second = nnx.Linear(64, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.third = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: Any) -> jax.Array:
        return self.third(self.dropout(nnx.tanh(self.second(nnx.tanh(self.first(x))))))


def loss_fn(model: Model, inputs: Any, targets: Any) -> jax.Array:
    return jnp.mean((model(inputs) - targets) ** 2)


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, inputs: Any, targets: Any) -> None:
    loss, grads = nnx.value_and_grad(loss_fn)(model, inputs, targets)
    flax_nnx.update(optimizer, model, grads, value=loss)  # <- healcore


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    # A list can be put back to any batch, and so can a Grain iterator.
    loader = [batch(index) for index in range(STEPS)]
    model = Model(nnx.Rngs(0))
    rate = optax.linear_schedule(0.01, 2.0, 300)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)
    tx = healcore.jax.protect(tx, "default")  # <- healcore
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer}
    evaluate = nnx.jit(loss_fn)
    options = {"store": directory, "loss_fn": lambda batch: evaluate(model, *batch)}
    with healcore.Healer("default", state=state, **options) as healer:  # <- healcore
        for x, y in healer.batches(loader):  # <- healcore
            train_step(model, optimizer, x, y)
    model.eval()
    loss = loss_fn(model, *batch(STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
