"""A JAX loop under the same policy as torch_loop.py: four batches are ruined, the run is not.

python examples/optax_loop.py
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from healcore.jax import metrics, protect

POLICY = Path(__file__).with_name("mine.toml")
RUINED = {60: float("nan"), 120: 1e3, 123: 1e3, 126: 1e3}
"""Step: what its targets are multiplied by."""


def loss_fn(params: dict, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean squared error of a network with one hidden layer."""
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)


def main() -> None:
    """Train a small regression and print what was done to it."""
    key, first, second = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(first, (8, 32)) / 8**0.5,
        "b1": jnp.zeros(32),
        "w2": jax.random.normal(second, (32, 1)) / 32**0.5,
        "b2": jnp.zeros(1),
    }
    tx = protect(optax.adamw(1e-2), policy=POLICY)
    state = tx.init(params)

    @jax.jit
    def train_step(params, state, inputs, targets):
        loss, grads = jax.value_and_grad(loss_fn)(params, inputs, targets)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state, loss

    loss = jnp.zeros(())
    for step in range(200):
        inputs = jax.random.normal(jax.random.fold_in(key, step), (64, 8))
        targets = jnp.sin(inputs.sum(axis=1, keepdims=True)) * RUINED.get(step, 1)
        params, state, loss = train_step(params, state, inputs, targets)
    seen = {name: float(value) for name, value in metrics(state).items()}
    skips, cuts = int(seen["heal/skips"]), int(seen["heal/lr_cuts"])
    print(f"loss {loss.item():.3f}, skips {skips}, cuts {cuts}")


if __name__ == "__main__":
    main()
