"""The demo's training loop in JAX and Flax; everything of healcore in it is marked."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import healcore.jax  # <- healcore
from healcore.core.verdict import Action
from healcore.demo.history import FIXED_CLIP, History
from healcore.demo.scenario import Scenario
from healcore.demo.snapshots import Snapshots
from healcore.jax.demo.model import ByteTransformer


def optimizer(scenario: Scenario, arm: str, policy: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW with its learning rate in the state, protected as the arm says."""
    adamw = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0, weight_decay=scenario.weight_decay
    )
    if arm == "healed":
        return healcore.jax.protect(adamw, policy)  # <- healcore
    if arm == "fixed clip":
        return optax.chain(optax.clip_by_global_norm(FIXED_CLIP), adamw)
    return optax.with_extra_args_support(adamw)


def train(scenario: Scenario, history: History, policy: Any) -> Iterator[int]:
    """Trains one model, yielding after each step so that runs can take turns.

    Args:
        scenario: data, model, learning rates, faults.
        history: takes the record; its `arm` says how the run is protected.
        policy: of the healed run; anything `healcore.jax.protect` takes.

    Yields:
        The number of steps done.
    """
    graph, params, constants = nnx.split(ByteTransformer(scenario), nnx.Param, ...)
    healed = history.arm == "healed"
    tx = optimizer(scenario, history.arm, policy)
    opt_state = tx.init(params)
    snapshots: Snapshots[Any] = Snapshots()

    def loss_of(params: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, constants).loss(tokens, weights)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, batch: Any, rate: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        opt_state = optax.tree.set(opt_state, learning_rate=rate)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # <- healcore
        # The state is donated: what the host wants to read leaves as outputs of its own.
        decision = healcore.jax.decision_of(opt_state) if healed else None  # <- healcore
        seen = {"loss": loss, "grad_norm": healcore.jax.global_norm(grads), "decision": decision}
        return optax.apply_updates(params, updates), opt_state, seen

    for step in range(scenario.steps):
        if healed and snapshots.due(step):
            snapshots.add(step, jax.tree.map(jnp.copy, (params, opt_state)))
        rate = scenario.learning_rate(step)
        batch = tuple(scenario.training_batch(step))
        params, opt_state, seen = train_step(params, opt_state, batch, jnp.float32(rate))

        last = history.record(step, learning_rate=rate, **seen)
        if healed and last:
            snapshots.observe(last.step, calm=not last.cause)
            if last.action & Action.STOP:
                history.stopped = True
                break
            if last.action & Action.ROLLBACK and (good := snapshots.go_back(last.depth)):
                params, then = jax.tree.map(jnp.copy, good.content)
                opt_state = healcore.jax.on_rollback(opt_state, then, policy)  # <- healcore
                history.went_back(step, good.step)
        yield step + 1

    history.finish(jax.jit(loss_of)(params, *scenario.held_out_batch()))
