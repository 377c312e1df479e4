"""A plain optax loop that goes back by itself: the lines that healcore adds are marked.

Twelve batches in a row are ruined. The first ones are skipped; at the tenth the run goes back to a
checkpoint that is known to be good, halves its learning rate, and leaves the bad batches out.

python examples/optax_healer.py [DIRECTORY]
"""

from __future__ import annotations

import functools
import sys
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

import healcore  # <- healcore

STEPS, BATCH = 400, 64
RUINED = range(250, 262)


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(index).standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets * np.float32("nan") if index in RUINED else targets


def loss_fn(params: dict[str, Any], inputs: Any, targets: Any) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    # A list can be put back to any batch, and so can a Grain iterator.
    loader = [batch(index) for index in range(STEPS)]
    first, second = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(first, (8, 32)) / 8**0.5,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32, 1)) / 32**0.5,
        "b2": jnp.zeros(1),
    }
    tx = optax.chain(optax.adamw(1e-2), contrib.reduce_on_plateau(patience=50))
    tx = healcore.jax.protect(tx, "default")  # <- healcore

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    with healcore.Healer("default", state=state, store=directory) as healer:  # <- healcore
        for x, y in healer.batches(loader):  # <- healcore
            healer.update(train_step(healer.state, x, y))  # <- healcore
    params, _ = healer.state
    loss = loss_fn(params, *batch(STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
