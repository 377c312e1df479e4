"""Runs of 500 steps, and their faults early, in the middle and late.

See tasks/{short_runs,wrong_numbers,gradient_faults,shifted_labels}.py. Wrong numbers come from the
torch task; the loop sets them in the state of `optax.inject_hyperparams`. Gradients are changed in
the compiled step, by the number of the step that comes with its batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.healbench.jax_tasks.models import (
    Arrays,
    byte_model,
    classification,
    cross_entropies,
    regression,
)
from benchmarks.healbench.jax_tasks.problem import Gradients, task
from benchmarks.healbench.problem import Task
from benchmarks.healbench.tasks.gradient_faults import LOSS_SCALE, garbage_steps, unscaled_steps
from benchmarks.healbench.tasks.short_runs import MAX_NORM, PLACES

_MIDDLE = PLACES["middle"]

# -- losses ----------------------------------------------------------------------------------------


def _numbered_classification(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """A batch begins with its number."""
    return classification(params, batch[1])


def _numbered_regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return regression(params, batch[1])


def _next_symbol(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """The first symbol of a row has no pair before it."""
    scores = byte_model(params, batch[:, :-1])[:, 1:]
    return cross_entropies(scores, batch[:, 2:]).mean(), {}


def _numbered_next_symbol(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return _next_symbol(params, batch[1])


# -- gradients -------------------------------------------------------------------------------------


def _clip(until: int | None = None) -> Gradients:
    """Clips to `MAX_NORM`, up to a step."""

    def gradients(grads: Arrays, batch: Any) -> Arrays:
        factor = jnp.minimum(1.0, MAX_NORM / (optax.tree.norm(grads) + 1e-6))
        if until is not None:
            factor = jnp.where(batch[0] < until, factor, 1.0)
        return optax.tree.scale(factor, grads)

    return gradients


def _unscaled(bad: Collection[int]) -> Gradients:
    """The gradients of the `bad` steps are those of the scaled loss."""

    def gradients(grads: Arrays, batch: Any) -> Arrays:
        factor = jnp.where(jnp.isin(batch[0], jnp.asarray(bad)), LOSS_SCALE, 1.0)
        return optax.tree.scale(factor, grads)

    return gradients


def _garbage(bad: Collection[int]) -> Gradients:
    """Standard normal numbers take the place of the gradients of the `bad` steps."""

    def gradients(grads: Arrays, batch: Any) -> Arrays:
        key = jax.random.fold_in(jax.random.key(0), batch[0])
        noise = optax.tree.random_like(key, grads)
        is_bad = jnp.isin(batch[0], jnp.asarray(bad))
        return jax.tree.map(lambda grad, garbage: jnp.where(is_bad, garbage, grad), grads, noise)

    return gradients


TASKS: tuple[Task, ...] = (
    task("adamw_mlp", classification),
    task("momentum_mlp", classification),
    task("small_transformer", _next_symbol),
    task("clipped_regression", _numbered_regression, gradients=_clip()),
    task("swapped_betas_early", _numbered_classification),
    task("swapped_betas_late", _numbered_classification),
    task("momentum_0.999_early", _numbered_classification),
    task("momentum_1.1_middle", _numbered_classification),
    task("decay_100_middle", _numbered_next_symbol),
    task("decay_3_sgd_late", _numbered_classification),
    task(
        "unscaled_late",
        _numbered_classification,
        gradients=_unscaled(unscaled_steps(PLACES["late"])),
    ),
    task(
        "unscaled_adamw_middle",
        _numbered_classification,
        gradients=_unscaled(unscaled_steps(_MIDDLE)),
    ),
    task("clip_forgotten_early", _numbered_regression, gradients=_clip(PLACES["early"])),
    task("clip_forgotten_middle", _numbered_regression, gradients=_clip(_MIDDLE)),
    task(
        "garbage_gradients_middle",
        _numbered_classification,
        gradients=_garbage(garbage_steps(_MIDDLE)),
    ),
    task("shifted_labels_late", classification),
)
