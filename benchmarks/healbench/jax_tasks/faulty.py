"""Faulty runs, and the two healthy ones that they are made of.

See tasks/learning_rates.py and tasks/sick_*.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.healbench.jax_tasks.models import Arrays, cross_entropies, mlp, next_byte
from benchmarks.healbench.jax_tasks.problem import Damage, State, task
from benchmarks.healbench.problem import Task


def _weighted(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """The classifier of `sick_base_mlp`; its rows have weights."""
    x, y, weight = batch
    return jnp.mean(weight * cross_entropies(mlp(params, x), y)), {}


def _flip_weight(state: State) -> State:
    """The largest weight of one matrix grows as a float16 whose top exponent bit flips."""
    name = "blocks.0.mlp.2.weight"
    weight = state.params[name]
    largest = jnp.unravel_index(jnp.abs(weight).argmax(), weight.shape)
    flipped = weight.at[largest].multiply(2.0**16)
    return state._replace(params={**state.params, name: flipped})


def _flip_moment(state: State) -> State:
    second = optax.tree.get(state.opt_state, "nu")
    name = "blocks.1.mlp.0.weight"
    second = {**second, name: jnp.zeros_like(second[name])}
    return state._replace(opt_state=optax.tree.set(state.opt_state, nu=second))


def _forget_second_moments(state: State) -> State:
    second = jax.tree.map(lambda each: 1e-12 * each, optax.tree.get(state.opt_state, "nu"))
    return state._replace(opt_state=optax.tree.set(state.opt_state, nu=second))


TASKS: tuple[Task, ...] = (
    task("norm_free_lm", next_byte),
    task("lr_6.7x", next_byte),
    task("lr_10x", next_byte, quick=True),
    task("slow_divergence", next_byte),
    task("corrupt_40_in_a_row", next_byte),
    task("bit_flip_weight", next_byte, damage=Damage(400, _flip_weight)),
    task("bit_flip_moment", next_byte, damage=Damage(400, _flip_moment)),
    task("poisoned_resume", next_byte, damage=Damage(300, _forget_second_moments)),
    task("sick_base_mlp", _weighted),
    task("corrupt_1pct", _weighted),
    task("bad_shard_15", _weighted),
    task("nan_batches", _weighted),
    task("nan_burst", _weighted, quick=True),
    task("inf_loss", _weighted),
)
