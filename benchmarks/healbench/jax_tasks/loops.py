"""Healthy runs whose own loop edits weights or adds terms.

See tasks/{weight_edits,projections,restarts,noise_switched_on}.py.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from benchmarks.healbench.jax_tasks.models import Arrays, classification, cross_entropies, mlp
from benchmarks.healbench.jax_tasks.problem import Damage, State, task
from benchmarks.healbench.problem import Task
from benchmarks.healbench.tasks.weight_edits import RESET


def _classification(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """A batch begins with its number."""
    return classification(params, batch[1])


def _mixed(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    inputs, targets = batch[1]
    return optax.softmax_cross_entropy(mlp(params, inputs), targets).mean(), {}


def _auxiliary(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """The second head's term has a gradient, and is no part of the observed loss."""
    inputs, labels, values, weight = batch[1]
    out = mlp(params, inputs)
    term = jnp.mean(weight * jnp.square(out[:, -1] - values))
    loss = cross_entropies(out[:, :-1], labels).mean()
    return loss + (term - lax.stop_gradient(term)), {}


def _reset_head(state: State) -> State:
    zeros = {name: jnp.zeros_like(state.params[name]) for name in ("4.weight", "4.bias")}
    return state._replace(params={**state.params, **zeros})


def _clip_weights(state: State) -> State:
    return state._replace(params=jax.tree.map(lambda w: jnp.clip(w, -0.15, 0.15), state.params))


TASKS: tuple[Task, ...] = (
    task("head_reset", _classification, damage=Damage(RESET, _reset_head)),
    task("clipped_weights", _classification, damage=Damage(RESET + 1, _clip_weights, every=1)),
    task("longer_cycles", _classification),
    task("mixup_on", _mixed),
    task("auxiliary_head", _auxiliary),
)
