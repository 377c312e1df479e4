"""Trains under a limit of the kernel on memory: `memory_limit_run.py FRAMEWORK [MEGABYTES]`.

Each layer keeps an array of the whole part for the backward pass, 16 MB for the whole batch and
256 MB in all layers. Prints a JSON object: samples of the parts of each step, of parts that failed,
and the parameters after the last step.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np

from healcore.runtime.healer import Healer

SAMPLES, WIDTH, LAYERS, STEPS = 4096, 1024, 16, 2


def limit(megabytes: int) -> None:
    """Allows that much more than the process has now."""
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * 2**20,) * 2)


def batches() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal((SAMPLES, WIDTH), np.float32) for _ in range(STEPS)]


def in_torch(megabytes: int | None) -> dict[str, Any]:
    import torch

    scale = torch.nn.Parameter(torch.ones(LAYERS, WIDTH))
    optimizer = torch.optim.SGD([scale], lr=1.0)

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        for layer in scale:
            x = torch.tanh(x) * layer
        return x.square().mean()

    loss_fn(torch.ones(1, WIDTH)).backward()  # starts autograd's threads
    scale.grad = None
    data, sizes, failed = [torch.from_numpy(each) for each in batches()], [], []
    done: list[int] = []
    with Healer(state={"scale": [scale], "optimizer": optimizer}) as healer:
        if megabytes is not None:
            limit(megabytes)
        for batch in healer.batches(data):
            for part in healer.microbatches(batch):
                with part:
                    loss = loss_fn(part.batch)
                    (loss * part.weight).backward()
                if part.first:
                    done = []
                (failed if part.failed else done).append(len(part.batch))
            sizes.append(done)
            optimizer.step()
            optimizer.zero_grad()
    return {"sizes": sizes, "failed": failed, "parameters": scale.detach().tolist()}


def in_jax(megabytes: int | None, *, donate: bool = False) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    from healcore.jax import protect

    tx = protect(optax.sgd(1.0), "default")

    def loss_fn(scale: Any, x: Any, weight: float) -> Any:
        x, kept = jax.lax.scan(lambda x, layer: (jnp.tanh(x) * layer, None), x, scale)
        return jnp.square(x).mean() * weight

    gradients = jax.jit(
        lambda state, x, weight: jax.value_and_grad(loss_fn)(state[0], x, weight),
        donate_argnums=0 if donate else (),
    )

    @jax.jit
    def apply(state: Any, loss: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, state[1], state[0], value=loss)
        return optax.apply_updates(state[0], updates), opt_state

    add = jax.jit(lambda total, more: jax.tree.map(jnp.add, total, more))
    scale = jnp.ones((LAYERS, WIDTH))
    data, sizes, failed = batches(), [], []
    done: list[int] = []
    total: Any = None
    with Healer(state=(scale, tx.init(scale))) as healer:
        apply(healer.state, jnp.zeros(()), scale)  # compiles it before there is a limit
        if megabytes is not None:
            limit(megabytes)
        for batch in healer.batches(data):
            for part in healer.microbatches(batch):
                with part:
                    found = gradients(healer.state, part.batch, part.weight)
                    jax.block_until_ready(found)  # on a CPU the call itself does not raise
                    total = found if part.first else add(total, found)
                if part.first:
                    done = []
                (failed if part.failed else done).append(len(part.batch))
            sizes.append(done)
            healer.update(apply(healer.state, *total))
        parameters = healer.state[0]
    return {"sizes": sizes, "failed": failed, "parameters": np.asarray(parameters).tolist()}


if __name__ == "__main__":
    framework, *more = sys.argv[1:]
    megabytes = int(more[0]) if more else None
    if framework == "torch":
        result = in_torch(megabytes)
    else:
        result = in_jax(megabytes, donate=framework == "jax-donates")
    print(json.dumps(result))
