"""The demo in JAX: model and step. `healcore.demo_runs.train` has the loop.

Lines that use healcore are marked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import healcore.jax  # <- healcore
from healcore.demo_runs import FIXED_CLIP, DemoTraining, Scenario, TokenBatch


class JaxTraining(DemoTraining):
    """A transformer in JAX, with AdamW whose learning rate is in the state."""

    array = staticmethod(jnp.asarray)
    concatenate = staticmethod(jnp.concatenate)
    gelu = staticmethod(jax.nn.gelu)
    attention = staticmethod(partial(jax.nn.dot_product_attention, is_causal=True))
    cross_entropy = staticmethod(optax.softmax_cross_entropy_with_integer_labels)

    def __init__(self, scenario: Scenario, arm: str, policy: Any) -> None:
        self.scenario = scenario
        optimizer: Any = optax.inject_hyperparams(optax.adamw)(
            learning_rate=0.0, weight_decay=scenario.weight_decay
        )
        if arm == "healed":
            optimizer = healcore.jax.protect(optimizer, policy)  # <- healcore
        if arm == "fixed clip":
            optimizer = optax.chain(optax.clip_by_global_norm(FIXED_CLIP), optimizer)
        tx = optax.with_extra_args_support(optimizer)
        params = jax.tree.map(jnp.asarray, scenario.initial_weights())
        self.state = (params, tx.init(params))
        self.evaluate = jax.jit(self.loss)

        @partial(jax.jit, donate_argnums=0)
        def step(state: Any, batch: TokenBatch, rate: float) -> Any:
            params, opt_state = state
            loss, grads = jax.value_and_grad(self.loss)(params, batch)
            opt_state = optax.tree.set(opt_state, learning_rate=jnp.float32(rate))
            updates, opt_state = tx.update(grads, opt_state, params, value=loss)  # <- healcore
            norm = optax.tree.norm(grads)
            return (optax.apply_updates(params, updates), opt_state), loss, norm

        self.compiled_step = step

    def loss_fn(self, state: Any, index: int) -> jax.Array:
        """See `DemoTraining.loss_fn`."""
        return self.evaluate(state[0], self.scenario.training_batch(index))

    def step(self, index: int, rate: float) -> tuple[jax.Array, jax.Array]:
        """See `DemoTraining.step`."""
        state = self.healer.state if self.healer else self.state  # <- healcore
        batch = self.scenario.training_batch(index)
        self.state, loss, norm = self.compiled_step(state, batch, rate)
        if self.healer:
            self.healer.update(self.state)  # <- healcore
        return loss, norm

    def held_out_loss(self) -> float:
        """See `DemoTraining.held_out_loss`."""
        params, _ = self.healer.state if self.healer else self.state
        return float(self.evaluate(params, self.scenario.held_out_batch()))
