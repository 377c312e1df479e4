"""The demo's training loop in JAX and Flax; everything of healcore in it is marked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import healcore.jax  # <- healcore
from healcore import Healer, RunStopped  # <- healcore
from healcore.demo.runs import FIXED_CLIP, SAVE_EVERY, Step
from healcore.demo.scenario import Scenario
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


def train(
    scenario: Scenario, arm: str, policy: Any, folder: Path
) -> Generator[Step, None, jax.Array]:
    """Trains one model, yielding each step so that runs can take turns; returns the held-out loss.

    `policy` and `folder` are those of the healed run. The step's number falls when it goes back.
    """
    graph, params, constants = nnx.split(ByteTransformer(scenario), nnx.Param, ...)
    tx = optimizer(scenario, arm, policy)
    state = (params, tx.init(params))
    batches, healer = range(scenario.steps), None

    def loss_of(params: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        return nnx.merge(graph, params, constants).loss(tokens, weights)

    evaluate = jax.jit(loss_of)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: Any, rate: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        opt_state = optax.tree.set(opt_state, learning_rate=rate)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # <- healcore
        norm = healcore.jax.global_norm(grads)
        return (optax.apply_updates(params, updates), opt_state), loss, norm

    with suppress(RunStopped), ExitStack() as stack:
        if arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state=state,
                    store=folder / "checkpoints",
                    events=folder / "events.jsonl",
                    loss_fn=lambda state, index: evaluate(
                        state[0], *scenario.training_batch(index)
                    ),
                    save_every=SAVE_EVERY,
                )
            )
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            state = healer.state if healer else state  # <- healcore
            rate = jnp.float32(scenario.learning_rate(step))
            batch = tuple(scenario.training_batch(index))
            state, loss, norm = train_step(state, batch, rate)
            if healer:
                healer.update(state)  # <- healcore
            yield Step(step, index, loss, norm)

    params, _ = healer.state if healer else state
    return evaluate(params, *scenario.held_out_batch())
