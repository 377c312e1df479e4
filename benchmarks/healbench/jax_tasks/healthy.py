"""Healthy runs on data that stay the same; see tasks/{stationary,generative,noisy}.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array

from benchmarks.healbench.jax_tasks.models import (
    Arrays,
    cross_entropies,
    linear,
    mlp,
    next_byte,
    small_cnn,
    squared_errors,
)
from benchmarks.healbench.jax_tasks.problem import Batches, Problem, port, task
from benchmarks.healbench.problem import Task
from benchmarks.healbench.tasks import TASKS as TORCH
from benchmarks.healbench.tasks.models import textured_shapes


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


def _negative_bound(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """Summed over the pixels and the code, in nats per image."""
    images, noise = batch
    mean, log_variance = jnp.split(mlp(params, images, "encoder.", layers=2), 2, axis=1)
    code = mean + noise * jnp.exp(0.5 * log_variance)
    logits = mlp(params, code, "decoder.", layers=2)
    likelihood = jnp.sum(jax.nn.softplus(logits) - images * logits)
    divergence = -0.5 * jnp.sum(1 + log_variance - jnp.square(mean) - jnp.exp(log_variance))
    return (likelihood + divergence) / len(images), {}


def _vae_sum(seed: int) -> Problem:
    source = TORCH["vae_sum"].build(seed)
    # The torch batches name rows of these images, which are the first thing that the task draws.
    images = textured_shapes(6000, torch.Generator().manual_seed(seed), noise=0.0)[0].flatten(1)
    batches = Batches(source.batches, lambda batch: (images[batch[0]], batch[1]))
    return port(source, _negative_bound, batches=batches)


def _noisy_regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return squared_errors(params, batch, jax.nn.silu).mean(), {}


def _summed_regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    return squared_errors(params, batch, jax.nn.silu).sum(), {}


_build_vae: Any = _vae_sum  # not the torch side's Problem

TASKS: tuple[Task, ...] = (
    task("lm_bytes", next_byte, quick=True),
    task("tabular_classification", _table),
    dataclasses.replace(TORCH["vae_sum"], build=_build_vae, quick=False),
    task("contrastive", _info_nce),
    task("batch_size_1", _noisy_regression),
    task("heavy_tailed", _noisy_regression),
    task("summed_loss_sgd", _summed_regression),
)
