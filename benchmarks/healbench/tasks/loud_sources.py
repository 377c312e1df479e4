"""Healthy runs on independent draws of whole batches from a quiet and a loud source."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch.optim import Adam

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Teacher,
    seeded,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, warmup_cosine


def _loud_source(seed: int, share: float, noise: float) -> Problem:
    """Both sources have the same function; targets of the loud one are noisier.

    Noise of variance 1 and 20 is what nobody can learn, so losses stay near 1 and 20.
    """
    generator, steps = seeded(seed), 800
    teacher = Teacher(generator, 0.7)
    loud = torch.rand(steps, generator=generator) < share
    data = [teacher.sample(ROWS, noise=noise * (20**0.5 if each else 1.0)) for each in loud]
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = warmup_cosine(optimizer, steps)
    return supervised(model, optimizer, data, [teacher.sample(HELD_OUT)], F.mse_loss, scheduler)


def _weighted_loss(seed: int) -> Problem:
    """15 % of the batches count 20 times, as importance weights of a rare source do."""
    generator, steps = seeded(seed), 800
    teacher = Teacher(generator, 0.7)
    weights = torch.where(torch.rand(steps, generator=generator) < 0.15, 20.0, 1.0)
    data = []
    for weight in weights:
        inputs, targets = teacher.sample(ROWS, noise=0.5)
        data.append((inputs, torch.cat([targets, weight.expand(ROWS, 1)], dim=1)))
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    inputs, targets = teacher.sample(HELD_OUT)
    held_out = (inputs, torch.cat([targets, torch.ones(HELD_OUT, 1)], dim=1))

    def loss(outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (batch[:, 1:] * (outputs - batch[:, :1]).square()).mean()

    return supervised(model, optimizer, data, [held_out], loss, warmup_cosine(optimizer, steps))


TASKS: tuple[Task, ...] = (
    Task(
        "losses_1_and_20",
        "healthy",
        "held-out error against noise-free targets",
        partial(_loud_source, share=0.5, noise=1.0),
        "Regression by an MLP, Adam; each batch is from one of two sources with losses of 1 and "
        "20, drawn independently.",
    ),
    Task(
        "loud_15pct",
        "healthy",
        "held-out error against noise-free targets",
        _weighted_loss,
        "The same; 15 % of the batches, drawn independently, have 20 times the loss and norm.",
    ),
)
