"""The demo in JAX and Flax: the model, and the training loop as a user would write it.

Everything of healcore in the loop is marked.
"""

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
from healcore.demo.scenario import BlockWeights, Scenario


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


class Block(nnx.Module):
    """Attention and MLP on a residual stream."""

    def __init__(self, weights: BlockWeights, heads: int) -> None:
        self.heads = heads
        self.qkv = nnx.Param(jnp.asarray(weights.qkv))
        self.out = nnx.Param(jnp.asarray(weights.out))
        self.up = nnx.Param(jnp.asarray(weights.up))
        self.down = nnx.Param(jnp.asarray(weights.down))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        q, k, v = (
            part.reshape(batch, time, self.heads, -1)
            for part in jnp.split(x @ self.qkv[...], 3, axis=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(batch, time, width) @ self.out[...]
        return x + jax.nn.gelu(x @ self.up[...], approximate=True) @ self.down[...]


class ByteTransformer(nnx.Module):
    """Predicts the next byte."""

    def __init__(self, scenario: Scenario) -> None:
        weights = scenario.initial_weights()
        self.embed = nnx.Param(jnp.asarray(weights.embed))
        self.blocks = nnx.List([Block(block, scenario.heads) for block in weights.blocks])
        self.head = nnx.Param(jnp.asarray(weights.head))
        cos, sin = scenario.rotations()
        self.cos = nnx.Variable(jnp.asarray(cos))
        self.sin = nnx.Variable(jnp.asarray(sin))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (batch, time) to logits (batch, time, 256)."""
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x, self.cos[...], self.sin[...])
        return x @ self.head[...]

    def loss(self, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats over the targets that count; NaN if none does."""
        logits = self(tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(each * weights) / jnp.sum(weights)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of (batch, time, heads, width / heads)."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)
