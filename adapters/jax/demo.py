"""The training of `healcore demo` in JAX."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import optax

from healcore.jax.transform import protect
from healcore.runtime.healer import Healer
from healcore.runtime.run.ending.exits import RunStopped


def train(
    policy: Any, store: Any, batches: Sequence[Any], rates: Sequence[float], unseen: Any
) -> float:
    """Trains a small network with a Healer, as `healcore.torch.demo.train` does."""
    params = {}
    for layer, (rows, columns) in enumerate([(8, 64), (64, 64), (64, 1)]):
        normal = jax.random.normal(jax.random.key(layer), (rows, columns))
        params |= {f"w{layer}": normal / rows**0.5, f"b{layer}": jnp.zeros(columns)}
    rate_of = jnp.asarray(rates, jnp.float32).__getitem__
    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=rate_of), policy)

    @jax.jit
    def loss_fn(state: Any, batch: Any) -> jax.Array:
        params, (inputs, targets) = state[0], batch
        hidden = jnp.tanh(inputs @ params["w0"] + params["b0"])
        hidden = jnp.tanh(hidden @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] + params["b2"] - targets) ** 2)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(lambda params: loss_fn((params,), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    state = (params, tx.init(params))
    with suppress(RunStopped), Healer(policy, state=state, store=store, loss_fn=loss_fn) as healer:
        for batch in healer.batches(batches):
            state = healer.update(step(healer.state, batch))
    return float(loss_fn(state, unseen))
