"""The demo's training loop in JAX and Flax; everything of healcore in it is marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import healcore.jax  # <- healcore
from healcore import Healer  # <- healcore
from healcore.demo.history import FIXED_CLIP, History
from healcore.demo.scenario import Scenario
from healcore.demo.terms import SAVE_EVERY
from healcore.jax.demo.model import ByteTransformer
from healcore.runtime.run.ending import RunStopped  # <- healcore


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


def train(scenario: Scenario, history: History, policy: Any, folder: Path) -> Iterator[int]:
    """Trains one model, yielding after each step so that runs can take turns.

    Args:
        scenario: data, model, learning rates, faults.
        history: takes the record; its `arm` says how the run is protected.
        policy: of the healed run; anything `healcore.jax.protect` takes.
        folder: the healed run's, for its checkpoints and its events file.

    Yields:
        The number of steps done; it falls when the run goes back.
    """
    graph, params, constants = nnx.split(ByteTransformer(scenario), nnx.Param, ...)
    healed = history.arm == "healed"
    tx = optimizer(scenario, history.arm, policy)
    state = (params, tx.init(params))
    batches, healer = range(scenario.steps), None

    def loss_of(params: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, constants).loss(tokens, weights)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: Any, rate: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        opt_state = optax.tree.set(opt_state, learning_rate=rate)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # <- healcore
        # The state is donated: what the host wants to read leaves as outputs of its own.
        decision = healcore.jax.last_decision(opt_state) if healed else None
        seen = {"loss": loss, "grad_norm": healcore.jax.global_norm(grads), "decision": decision}
        return (optax.apply_updates(params, updates), opt_state), seen

    with suppress(RunStopped), ExitStack() as stack:
        if healed:
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state=state,
                    store=folder / "checkpoints",
                    events=folder / "events.jsonl",
                    save_every=SAVE_EVERY,
                )
            )
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            state = healer.state if healer else state  # <- healcore
            rate = scenario.learning_rate(step)
            batch = tuple(scenario.training_batch(index))
            state, seen = train_step(state, batch, jnp.float32(rate))
            if healer:
                healer.update(state)  # <- healcore
            history.record(step, batch=index, learning_rate=rate, **seen)
            yield step + 1

    params, _ = healer.state if healer else state
    history.finish(jax.jit(loss_of)(params, *scenario.held_out_batch()))
