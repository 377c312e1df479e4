"""An optax loop that continues when memory runs out: the lines that healcore adds are marked.

The device here has memory for eight samples at a time, and the batches have 32. The first step is
repeated with 16 at a time, then with eight; later steps begin with eight. The summed gradients are
the gradients of whole batches. The state is donated only where the gradients
are applied: a function that runs out of memory has lost what it was given to overwrite.

python examples/out_of_memory_jax.py
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import healcore  # <- healcore

STEPS, BATCH, FITS = 400, 32, 8


def batch(index: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(index).standard_normal((BATCH, 8), np.float32)
    return inputs, np.sin(inputs.sum(axis=1, keepdims=True))


def loss_fn(params: Any, inputs: Any, targets: Any, weight: Any = 1.0) -> jax.Array:
    hidden = jnp.tanh(inputs @ params["w1"])
    return jnp.mean((hidden @ params["w2"] - targets) ** 2) * weight


gradients = jax.jit(jax.value_and_grad(loss_fn))  # donates nothing
add = jax.jit(functools.partial(jax.tree.map, jnp.add), donate_argnums=0)


def on_small_device(params: Any, inputs: Any, targets: Any, weight: float) -> Any:
    """The loss and the gradients, on a device that has memory for `FITS` samples."""
    if len(inputs) > FITS:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2147483648")
    return gradients(params, inputs, targets, weight)


def main() -> None:
    """Train a small regression, and print how it went."""
    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (8, 64)) / 3,
        "w2": jax.random.normal(keys[1], (64, 1)) / 8,
    }
    tx = healcore.jax.protect(optax.adamw(1e-2), "default")  # <- healcore

    @functools.partial(jax.jit, donate_argnums=0)
    def apply(state: Any, loss: Any, grads: Any) -> Any:
        params, opt_state = state
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state

    sizes: list[int] = []
    total: Any = None
    loader = [batch(index) for index in range(STEPS)]
    with healcore.Healer("default", state=(params, tx.init(params))) as healer:  # <- healcore
        for whole in healer.batches(loader):  # <- healcore
            for part in healer.microbatches(whole):  # <- healcore
                with part:  # <- healcore
                    found = on_small_device(healer.state[0], *part.batch, part.weight)
                    total = found if part.first else add(total, found)  # <- healcore
                    sizes.append(len(part.batch[0]))
            healer.update(apply(healer.state, *total))  # <- healcore
    loss = loss_fn(healer.state[0], *batch(STEPS)).item()
    print(f"loss {loss:.3f}, steps {healer.step}, largest part {max(sizes)}")


if __name__ == "__main__":
    main()
