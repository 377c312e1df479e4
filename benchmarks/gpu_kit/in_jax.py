"""JAX on the default device, against the same on its CPU.

Nothing here imports torch: the CUDA libraries of torch may be too old for JAX.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore
from healcore.jax import protect as protected


def _on_device(check: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The check, skipped where there is a CUDA device that JAX does not see."""

    @functools.wraps(check)
    def run() -> dict[str, Any]:
        if os.environ.get("GPU_KIT_CUDA") == "1" and jax.default_backend() != "gpu":
            why = f"JAX {jax.__version__} sees no CUDA device: install jax[cuda12] or jax[cuda13]"
            return {"outcome": "skipped", "why": why}
        return {**check(), "jax_device": jax.devices()[0].device_kind, "jax": jax.__version__}

    return run


def _replayed(tx: Any, device: Any) -> tuple[np.ndarray, list[float], Any]:
    """The parameter, the size of each update and the last state, with a NaN and a spike."""
    norms = [1.0 + (i * 7 % 5) / 10 for i in range(40)]
    norms[30], norms[35] = math.nan, 1e5
    with jax.default_device(device):
        tx = optax.with_extra_args_support(tx)
        params = jnp.ones(1)
        state = tx.init(params)

        @jax.jit
        def step(params: Any, state: Any, grad: Any, loss: Any) -> Any:
            updates, state = tx.update(grad, state, params, value=loss)
            return optax.apply_updates(params, updates), state, jnp.abs(updates).sum()

        sizes = []
        for norm in norms:
            params, state, size = step(params, state, jnp.full(1, norm), jnp.float32(2.0))
            sizes.append(float(size))
        return np.asarray(params), sizes, state


def _compared(make: Any, policy: str) -> dict[str, Any]:
    here = _replayed(make(), jax.devices()[0])
    cpu = _replayed(make(), jax.devices("cpu")[0])
    np.testing.assert_allclose(here[0], cpu[0], rtol=1e-6)
    np.testing.assert_allclose(here[1], cpu[1], rtol=1e-5)
    assert np.isfinite(here[0]).all()
    assert here[1][30] == 0.0, "the NaN has moved the parameters"
    states = [healcore.jax.to_dict(state, policy)["state"] for *_, state in (here, cpu)]
    assert states[0]["tally"] == states[1]["tally"], "other decisions"
    return {"state": "same bits" if states[0] == states[1] else "other bits, same decisions"}


@_on_device
def protect() -> dict[str, Any]:
    """`protect`: the updates and decisions of the CPU."""
    return _compared(lambda: protected(optax.sgd(0.01), "default"), "default")


@_on_device
def heal_zclip() -> dict[str, Any]:
    """`heal_zclip` in a chain: the updates and decisions of the CPU."""
    make = lambda: optax.chain(healcore.jax.heal_zclip(), optax.sgd(0.01))  # noqa: E731
    return _compared(make, "zclip")


@_on_device
def jax_rollback() -> dict[str, Any]:
    """A Healer with a `loss_fn`, donated state, and a rate that becomes far too high."""

    def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng(number)
        x = random.standard_normal((64, 8), np.float32)
        return x, np.sin(x.sum(axis=1, keepdims=True))

    def loss_fn(params: Any, batch: Any) -> Any:
        hidden = jnp.tanh(batch[0] @ params["w1"] + params["b1"])
        return jnp.mean((hidden @ params["w2"] - batch[1]) ** 2)

    def rate(step: Any) -> Any:
        return jnp.where((step >= 200) & (step < 240), 3.0, 0.05)

    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (8, 64)) / 8**0.5,
        "b1": jnp.zeros(64),
        "w2": jax.random.normal(keys[1], (64, 1)) / 8,
    }
    tx = protected(optax.inject_hyperparams(optax.sgd)(learning_rate=rate), "default")

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    with healcore.Healer(
        "default",
        state=(params, tx.init(params)),
        loss_fn=jax.jit(lambda state, batch: loss_fn(state[0], batch)),
        checkpoints=healcore.Checkpoints(every=50),
    ) as healer:
        for each in healer.batches([batch(number) for number in range(400)]):
            healer.update(step(healer.state, each))
        end = float(loss_fn(healer.state[0], batch(10**6)))
    assert healer.rollbacks >= 1
    assert end < 1.0, end
    return {"rollbacks": healer.rollbacks, "unseen_loss": end}
