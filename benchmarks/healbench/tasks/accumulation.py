"""Runs with gradient accumulation: an iteration is a micro-batch, and a step takes four of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.healbench.problem import Problem, Update, task
from benchmarks.healbench.tasks.loops import damaged_once
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    Batch,
    Clusters,
    batches,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

_STEPS = 500
_MICRO = 4
_METRIC = "held-out loss"


@task("accumulation", _METRIC)
def accumulated(seed: int) -> Problem:
    """An MLP classifier, AdamW; gradients of four micro-batches are added up for each step."""
    # The loop of a user: `(loss / 4).backward()`, and a step at every fourth micro-batch.
    clusters = Clusters(8, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, 8)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    data = batches(clusters.sample(_STEPS * _MICRO * 16), rows=16)
    scheduler: LRScheduler = warmup_cosine(optimizer, _STEPS)
    problem = supervised(model, optimizer, data, [clusters.sample(HELD_OUT)], scheduler=scheduler)
    inner = problem.loss_fn
    assert inner is not None
    problem.batches = list(enumerate(data, start=1))

    def loss_of(batch: tuple[int, Batch]) -> Tensor:
        return inner(batch[1])

    def step(batch: tuple[int, Batch], update: Update) -> None:
        update(loss_of(batch), step=batch[0] % _MICRO == 0, share=1 / _MICRO)

    problem.step, problem.loss_fn = step, loss_of
    return problem


@torch.no_grad()
def _layer_damaged(problem: Problem) -> None:
    layer: Any = problem.modules["model"]
    assert isinstance(layer, nn.Sequential)
    weight: Any = layer[2].weight
    weight.mul_(50.0)


@task("damage", _METRIC, reference="accumulated")
def accumulated_damage(seed: int) -> Problem:
    """The same; at half of the run the weights of the hidden layer become 50 times as large."""
    return damaged_once(accumulated(seed), _STEPS // 2 * _MICRO, _layer_damaged)
