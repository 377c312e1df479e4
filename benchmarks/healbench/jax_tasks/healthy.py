"""Healthy runs with a plain loop; see tasks/ stationary, noisy, shifting_data, mixed_data."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.healbench.jax_tasks.models import (
    Arrays,
    classification,
    cross_entropies,
    linear,
    mlp,
    next_byte,
    regression,
    small_cnn,
    squared_errors,
)
from benchmarks.healbench.jax_tasks.problem import task
from benchmarks.healbench.problem import Task


def _table(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """Three categories of six levels each, embedded together with the numbers."""
    numbers, categories, classes = batch
    embedded = params["embedding.weight"][categories + 6 * jnp.arange(3)]
    inputs = jnp.concatenate([numbers, embedded.reshape(len(numbers), -1)], 1)
    return cross_entropies(mlp(params, inputs, "mlp.", norm=True), classes).mean(), {}


def _info_nce(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """Each view finds its other one among all views of the batch, at a temperature of 0.2."""
    features, seen = small_cnn(params, jnp.concatenate(batch), "0.")
    z = linear(params, "2", jax.nn.relu(features))
    z /= jnp.linalg.norm(z, axis=1, keepdims=True)
    likeness = jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, z @ z.T / 0.2)
    other = jnp.roll(jnp.arange(len(z)), len(z) // 2)
    return cross_entropies(likeness, other).mean(), seen


def _noisy_regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return squared_errors(params, batch, jax.nn.silu).mean(), {}


def _summed_regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return squared_errors(params, batch, jax.nn.silu).sum(), {}


TASKS: tuple[Task, ...] = (
    task("lm_bytes", next_byte, quick=True),
    task("tabular_classification", _table),
    task("contrastive", _info_nce),
    task("batch_size_1", _noisy_regression),
    task("heavy_tailed", _noisy_regression),
    task("summed_loss_sgd", _summed_regression),
    task("domain_change", classification, quick=True),
    task("curriculum", regression),
    task("sorted_stream", classification),
    task("two_domains_alternating", classification),
    task("harder_noise", regression),
    task("rare_class_12", classification),
    task("rare_class_60", classification, quick=True),
    task("rare_class_300", classification),
)
