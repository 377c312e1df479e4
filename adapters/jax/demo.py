"""The demo in JAX: a model and a training loop. Lines that use healcore are marked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import healcore.jax  # <- healcore
from healcore import Checkpoints, Healer, Logging, RunStopped  # <- healcore
from healcore.demo_runs import FIXED_CLIP, SAVE_EVERY, Scenario, Step

Params = dict[str, jax.Array]


def optimizer(scenario: Scenario, arm: str, policy: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW with its learning rate in the state, protected or clipped.

    Args:
        scenario: the run of the demo.
        arm: "healed", "fixed clip", or any other name for a run without either.
        policy: the policy of the healed run.
    """
    adamw = optax.inject_hyperparams(optax.adamw)(
        learning_rate=0.0, weight_decay=scenario.weight_decay
    )
    if arm == "healed":
        return healcore.jax.protect(adamw, policy)  # <- healcore
    if arm == "fixed clip":
        return optax.chain(optax.clip_by_global_norm(FIXED_CLIP), adamw)
    return optax.with_extra_args_support(adamw)


def train(
    scenario: Scenario, arm: str, policy: Any, folder: Path, on_step: Callable[[Step], object]
) -> float:
    """Trains one model, calls `on_step` after each step, and returns the held-out loss.

    Args:
        scenario: the data, the model's size and the fault of the run.
        arm: name of the run, see `optimizer`.
        policy: the policy of the healed run.
        folder: where the healed run writes checkpoints and events.
        on_step: called with each step. A rollback decreases the step's number.

    Returns:
        The loss on the held-out batch in nats, which may be NaN.
    """
    params = jax.tree.map(jnp.asarray, scenario.initial_weights())
    tx = optimizer(scenario, arm, policy)
    state = (params, tx.init(params))
    batches = range(scenario.steps)
    healer = None
    loss_of = model_loss(scenario)
    evaluate = jax.jit(loss_of)

    @partial(jax.jit, donate_argnums=0)
    def train_step(state: Any, batch: Any, rate: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, *batch)
        opt_state = optax.tree.set(opt_state, learning_rate=rate)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # <- healcore
        norm = optax.tree.norm(grads)
        return (optax.apply_updates(params, updates), opt_state), loss, norm

    def loss_of_batch(state: Any, index: int) -> jax.Array:
        return evaluate(state[0], *scenario.training_batch(index))

    with suppress(RunStopped), ExitStack() as stack:
        if arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state=state,
                    store=folder / "checkpoints",
                    logging=Logging(events=folder / "events.jsonl"),
                    loss_fn=loss_of_batch,
                    checkpoints=Checkpoints(every=SAVE_EVERY),
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
            on_step(Step(step, index, float(loss), float(norm)))

    params, _ = healer.state if healer else state
    return float(evaluate(params, *scenario.held_out_batch()))


def model_loss(scenario: Scenario) -> Callable[[Params, Any, Any], jax.Array]:
    """Loss function of a byte-level transformer: mean cross-entropy in nats.

    The loss is NaN if all weights of the targets are 0. The model has rotary attention and a GELU
    MLP, without normalisation.

    Args:
        scenario: the sizes of the model.

    Returns:
        A function of the weights, the tokens, int32 (batch, time + 1), and the weight of each
        target, float32 (batch, time).
    """
    cos, sin = map(jnp.asarray, scenario.rotations())
    cos, sin = cos[:, None, :], sin[:, None, :]

    def rotate(x: jax.Array) -> jax.Array:
        """Rotary position embedding of (batch, time, heads, width / heads)."""
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)

    def logits(w: Params, tokens: jax.Array) -> jax.Array:
        """Tokens (batch, time) to logits (batch, time, 256)."""
        x = w["embed"][tokens]
        batch, time, width = x.shape

        def split_heads(part: jax.Array) -> jax.Array:
            return part.reshape(batch, time, scenario.heads, -1)

        for layer in range(scenario.layers):
            q, k, v = map(split_heads, jnp.split(x @ w[f"qkv{layer}"], 3, axis=-1))
            mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
            x = x + mixed.reshape(batch, time, width) @ w[f"out{layer}"]
            x = x + jax.nn.gelu(x @ w[f"up{layer}"], approximate=True) @ w[f"down{layer}"]
        return x @ w["head"]

    def loss(w: Params, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        each = optax.softmax_cross_entropy_with_integer_labels(
            logits(w, tokens[:, :-1]), tokens[:, 1:]
        )
        return jnp.sum(each * weights) / jnp.sum(weights)

    return loss
