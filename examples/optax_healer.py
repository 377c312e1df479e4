"""A plain optax loop that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high, and the parameters get worse. The Healer
compares them with earlier parameters on the same batches, restores the earlier ones, and limits the
learning rate, which `inject_hyperparams` shows it. Without healcore the run ends as NaN.

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

import healcore  # <- healcore

STEPS, BATCH = 400, 64


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets + 0.1 * rng.standard_normal((BATCH, 1), np.float32)


def loss_fn(params: dict[str, Any], inputs: Any, targets: Any) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    hidden = jnp.tanh(hidden @ params["w2"] + params["b2"])
    return jnp.mean((hidden @ params["w3"] + params["b3"] - targets) ** 2)


def main(directory: str) -> None:
    """Train a small regression, and print how it went."""
    # A list can be put back to any batch, and so can a Grain iterator.
    loader = [batch(index) for index in range(STEPS)]
    params = {}
    for layer, (rows, columns) in enumerate([(8, 64), (64, 64), (64, 1)], start=1):
        normal = jax.random.normal(jax.random.key(layer), (rows, columns))
        params |= {f"w{layer}": normal / rows**0.5, f"b{layer}": jnp.zeros(columns)}
    rate = optax.linear_schedule(0.01, 2.0, 300)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)
    tx = healcore.jax.protect(tx, "default")  # <- healcore

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, inputs: Any, targets: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    evaluate = jax.jit(lambda state, batch: loss_fn(state[0], *batch))
    with healcore.Healer(  # <- healcore
        "default", state=state, store=directory, loss_fn=evaluate
    ) as healer:
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
