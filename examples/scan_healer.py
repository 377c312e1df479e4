"""`jax.lax.scan` over ten steps per dispatch, under a Healer: every step is judged by itself.

Batch 45 is NaN: that step alone is skipped on the device, and the other nine of its dispatch are
applied. The learning rate rises far too high, until no step is finite: between two dispatches the
Healer restores the first parameters, and limits the learning rate when that happens again. Without
healcore the loss is NaN from batch 45 on.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore

STEPS, BATCH, SCAN, BAD = 400, 64, 10, 45


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(index)
    inputs = rng.standard_normal((BATCH, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, np.full_like(targets, np.nan) if index == BAD else targets


def loss_fn(params: dict[str, Any], inputs: Any, targets: Any) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"] + params["b1"])
    hidden = jnp.tanh(hidden @ params["w2"] + params["b2"])
    return jnp.mean((hidden @ params["w3"] + params["b3"] - targets) ** 2)


def main() -> None:
    """Train a small regression, and print which steps were skipped and how it went."""
    params = {}
    for layer, (rows, columns) in enumerate([(8, 64), (64, 64), (64, 1)], start=1):
        normal = jax.random.normal(jax.random.key(layer), (rows, columns))
        params |= {f"w{layer}": normal / rows**0.5, f"b{layer}": jnp.zeros(columns)}
    rate = optax.linear_schedule(0.01, 2.0, 300)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=0.9)
    tx = healcore.jax.protect(tx, "default")

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        skip = healcore.jax.last_decision(opt_state).skip
        return (optax.apply_updates(params, updates), opt_state), skip

    @functools.partial(jax.jit, donate_argnums=0)
    def train_steps(state: Any, batches: Any) -> tuple[Any, jax.Array]:
        return jax.lax.scan(step, state, batches)

    state = (params, tx.init(params))
    inputs, targets = map(np.stack, zip(*map(batch, range(STEPS)), strict=True))
    # One element of the loader is the data of one dispatch.
    loader = [(inputs[i : i + SCAN], targets[i : i + SCAN]) for i in range(0, STEPS, SCAN)]
    skips = {}  # first step of a dispatch -> its skips; repeated steps replace undone ones
    losses = jax.vmap(loss_fn, in_axes=(None, 0, 0))
    evaluate = jax.jit(lambda state, batches: losses(state[0], *batches).mean())
    with healcore.Healer("default", state=state, loss_fn=evaluate) as healer:
        for batches, state in healer.batches(loader).with_state():
            first = healer.step
            state, skipped = train_steps(state, batches)
            healer.update(state)
            skips[first] = skipped
    for first, skipped in skips.items():
        if skipped.any():
            print(f"from step {first}, skipped:", *skipped.astype(int))
    loss = loss_fn(healer.state[0], *batch(STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, rollbacks {healer.rollbacks}")


if __name__ == "__main__":
    main()
