"""Heals a run with a `loss_fn` over all devices of a program, on the same global batches.

`run` is a scenario of `processes`: of several with a device each, or of one with several devices.
"""

# optax types arrays as a union of many kinds.
# pyright: reportArgumentType=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import healcore
from healcore.jax import protect
from healcore.jax.store import MemoryStore
from healcore.runtime.store import Keep
from tests.jax.trained_together import placed, whole
from tests.torch.compared_ranks import watched

STEPS, FAULT, SAVE_EVERY, ROWS = 110, 65, 20, 16
RATE, JUMP = 1e-2, 100.0
FAULTS = ("damage", "rate", "healthy")
"""All weights x 50, once; the rate x 100; targets x 10 from then on, which is no fault."""
SPECS = {"w1": P(None, "data"), "w2": P("data"), "w3": P()}


def mean_square(params: Any, rows: Any) -> Any:
    hidden = jnp.tanh(jnp.tanh(rows[:, :8] @ params["w1"]) @ params["w2"])
    return jnp.mean((hidden @ params["w3"] - rows[:, 8:]) ** 2)


def global_rows(fault: str, step: int) -> np.ndarray:
    """Inputs and targets of all processes."""
    draw = np.random.default_rng(step)
    x = draw.normal(size=(ROWS, 8)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True)) + 0.3 * draw.normal(size=(ROWS, 1)).astype(np.float32)
    return np.concatenate([x, 10.0 * y if fault == "healthy" and step >= FAULT else y], 1)


def run(root: Path, fault: str) -> dict[str, Any]:
    """One healed run with a fault at step `FAULT`."""
    del root
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    draw = np.random.default_rng(0)
    shapes = {"w1": (8, 16), "w2": (16, 16), "w3": (16, 1)}
    params = {
        name: placed(mesh, (draw.normal(size=shape) / 4).astype(np.float32), SPECS[name])
        for name, shape in shapes.items()
    }

    def rate(count: Any) -> Any:
        return jnp.where((fault == "rate") & (count >= FAULT), RATE * JUMP, RATE)

    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=rate), "default")

    def step(state: Any, rows: Any, factor: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_square)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        return jax.tree.map(lambda each: each * factor, params), opt_state

    step = jax.jit(step, donate_argnums=0)
    evaluated = jax.jit(mean_square)

    def rows_of(number: int) -> jax.Array:
        return placed(mesh, global_rows(fault, number), P("data"))

    def loss_fn(state: Any, number: int) -> Any:
        return evaluated(state[0], rows_of(number))

    seen: list[Any] = []
    rollbacks: list[Any] = []
    damaged = False
    healer: Any = healcore.Healer(
        "default",
        state=(params, tx.init(params)),
        loss_fn=loss_fn,
        store=MemoryStore(keep=Keep(good=5, candidates=5)),
        checkpoints=healcore.Checkpoints(every=SAVE_EVERY),
        rollback={"probation": SAVE_EVERY},
        hooks=healcore.Hooks(on_rollback=[lambda event: rollbacks.append(dict(event))]),
        logging=healcore.Logging(console=False),
    )
    with healer:
        watched(healer._loop.recovery.dominance, seen)
        for number in healer.batches(list(range(STEPS))):
            damages = fault == "damage" and number == FAULT and not damaged
            factor = 50.0 if damages else 1.0
            damaged |= factor > 1
            healer.update(step(healer.state, rows_of(number), factor))
        scale = healer.metrics()["heal/lr_scale"]
    held = jax.tree.leaves(whole(mesh, healer.state[0]))
    names = ("step", "checkpoint", "onset", "lr_limit", "lr_scale", "batches")
    return {
        "compared": seen,
        "rollbacks": [{name: each.get(name) for name in names} for each in rollbacks],
        "lr_scale": float(scale),
        "norm": float(np.sqrt(sum(np.square(each).sum() for each in held))),
    }
