"""Trains in JAX with and without a limit of the kernel on memory.

Each layer keeps an array of the part for the backward pass, 16 MB for the whole batch. Each run
prints a JSON object: samples of the parts of each step, of parts that failed, and the parameters
after the last step.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from healcore import policy as policies
from healcore.jax.heal_state import HealStateError
from healcore.runtime.healer import Healer
from tests.healer import memory_limit

POLICY = policies.loads(
    """
schema = 1
name = "smaller parts"
[detect.nonfinite]
[[respond]]
to = ["nonfinite"]
do = ["skip"]
[[respond]]
to = ["oom"]
do = ["shrink_microbatch"]
"""
)
SAMPLES, WIDTH, LAYERS, STEPS = 4096, 1024, 16, 2
LIMIT = 100 * 2**20
"""Bytes: a quarter of the batch does not fit, an eighth leaves room for the rest of a step."""


def limited(enabled: bool) -> AbstractContextManager[None]:
    """Allows `LIMIT` more than the process has now."""
    return memory_limit.limited(LIMIT) if enabled else nullcontext()


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((SAMPLES, WIDTH), np.float32) for _ in range(STEPS)]


@cache
def jax_functions() -> tuple[Any, ...]:
    """The transformation and the compiled functions, the same for all runs."""
    import jax
    import jax.numpy as jnp
    import optax

    from healcore.jax import protect

    tx = protect(optax.sgd(1.0), POLICY)

    def loss_fn(scale: Any, x: Any, weight: float) -> Any:
        x, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x) * layer, None), x, scale)
        return jnp.square(x).mean() * weight

    def gradients(state: Any, x: Any, weight: float) -> Any:
        return jax.value_and_grad(loss_fn)(state[0], x, weight)

    def apply(state: Any, loss: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, state[1], state[0], value=loss)
        return optax.apply_updates(state[0], updates), opt_state

    def add(total: Any, more: Any) -> Any:
        return jax.tree.map(jnp.add, total, more)

    def compiled(function: Any) -> dict[int, Any]:
        """By the number of samples: compiling takes memory too, which is not to be limited."""
        scale = jnp.ones((LAYERS, WIDTH))
        parts = [np.zeros((SAMPLES >> halvings, WIDTH), np.float32) for halvings in range(5)]
        state = scale, tx.init(scale)
        return {len(each): function.lower(state, each, 1.0).compile() for each in parts}

    keeps, donates = jax.jit(gradients), jax.jit(gradients, donate_argnums=0)
    return tx, compiled(keeps), compiled(donates), jax.jit(apply), jax.jit(add)


def in_jax(*, limit: bool, donate: bool = False) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    tx, keeps, donates, apply, add = jax_functions()
    gradients = donates if donate else keeps
    scale = jnp.ones((LAYERS, WIDTH))
    data, sizes, failed = batches(), [], []
    done: list[int] = []
    total: Any = None
    # Compiled before there is a limit.
    apply((scale, tx.init(scale)), *add((jnp.zeros(()), scale), (jnp.zeros(()), scale)))
    with Healer(POLICY, state=(scale, tx.init(scale))) as healer, limited(limit):
        for batch in healer.batches(data):
            for part in healer.microbatches(batch):
                with part:
                    found = gradients[len(part.batch)](healer.state, part.batch, part.weight)
                    jax.block_until_ready(found)  # on a CPU the call itself does not raise
                    total = found if part.first else add(total, found)
                if part.first:
                    done = []
                (failed if part.failed else done).append(len(part.batch))
            sizes.append(done)
            healer.update(apply(healer.state, *total))
        parameters = healer.state[0]
    return {"sizes": sizes, "failed": failed, "parameters": np.asarray(parameters).tolist()}


def main() -> None:
    print(json.dumps(in_jax(limit=True)))
    print(json.dumps(in_jax(limit=False)))
    try:
        in_jax(limit=True, donate=True)
    except HealStateError as error:
        print(json.dumps(str(error)))


if __name__ == "__main__":
    main()
