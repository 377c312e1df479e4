"""Healthy runs of 500 steps, made to have faults early, in the middle and late.

`wrong_numbers`, `gradient_faults` and `shifted_labels` have the faults. `clipped_regression` clips
its own gradients, because a few of its gradients are huge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import with_step_number
from benchmarks.healbench.tasks.middle_faults import STEPS
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    Teacher,
    batches,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

PLACES = {"early": STEPS * 15 // 100, "middle": STEPS // 2, "late": STEPS * 85 // 100}
"""The first step of a fault, by the last word of the task's name."""
CLASSES = 8
MAX_NORM = 1.0
"""Largest norm of a gradient after the clip of a program that clips."""
METRICS = {
    "adamw_mlp": "held-out loss",
    "momentum_mlp": "held-out loss",
    "small_transformer": "held-out loss, nats per symbol",
    "clipped_regression": "held-out error against noise-free targets",
}
"""The metrics of the healthy runs, by name."""

# -- classifiers ----------------------------------------------------------------------------------


def _classifier(seed: int, optimizer: Callable[[Any], Optimizer]) -> Problem:
    clusters = Clusters(CLASSES, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, CLASSES)
    inner = optimizer(model.parameters())
    data, held_out = batches(clusters.sample(STEPS * ROWS)), clusters.sample(HELD_OUT)
    return supervised(model, inner, data, [held_out], scheduler=warmup_cosine(inner, STEPS, 20))


@task("stationary", METRICS["adamw_mlp"])
def adamw_mlp(seed: int) -> Problem:
    """An MLP classifier, AdamW with a short warm-up and cosine decay."""
    return _classifier(seed, lambda weights: AdamW(weights, lr=5e-3))


@task("stationary", METRICS["momentum_mlp"])
def momentum_mlp(seed: int) -> Problem:
    """The same classifier, SGD with momentum 0.9 and weight decay."""
    return _classifier(seed, lambda weights: SGD(weights, lr=0.1, momentum=0.9, weight_decay=5e-4))


# -- programs that clip ---------------------------------------------------------------------------


def clipping_until(problem: Problem, last: int = STEPS) -> Problem:
    """The program clips its gradients to `MAX_NORM`, up to a step."""

    def gradients(step: int, model: nn.Module) -> None:
        if step < last:
            clip_grad_norm_(model.parameters(), MAX_NORM)

    return with_step_number(problem, gradients=gradients)


def unclipped_regression(seed: int) -> Problem:
    """The run of `clipped_regression` without its clip."""
    generator = seeded(seed)
    teacher = Teacher(generator, 0.7)
    data = []
    for _ in range(STEPS):
        inputs, targets = teacher.sample(ROWS, noise=0.1)
        if float(torch.rand((), generator=generator)) < 0.06:
            targets = 100.0 * targets  # in another unit
        data.append((inputs, targets))
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = warmup_cosine(optimizer, STEPS, 20)
    return supervised(model, optimizer, data, [teacher.sample(HELD_OUT)], F.mse_loss, scheduler)


@task("noise", METRICS["clipped_regression"])
def clipped_regression(seed: int) -> Problem:
    """Regression by an MLP, SGD, a clip; 6 % of the batches have targets in another unit."""
    return clipping_until(unclipped_regression(seed))
