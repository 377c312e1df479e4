"""Healthy runs with restarts of the rate or of the moments, and with a rate that is raised."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import STEPS, classifier, start
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    batches,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, seeded

_CYCLE = 150


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _longer(i: int) -> float:
    """SGDR (Loshchilov and Hutter 2017): cycles of 40, 80, 160 and 320 steps."""
    length = 40
    while i >= length:
        i, length = i - length, 2 * length
    return _cosine(i / length)


def _higher(i: int) -> float:
    """Each cycle begins at twice the rate of the one before."""
    cycle, step = divmod(i, _CYCLE)
    return 2.0**cycle * max(0.01, _cosine(step / _CYCLE))


def _cycles(seed: int, factor: Callable[[int], float], rate: float) -> Problem:
    clusters, model = start(seed)
    optimizer = SGD(model.parameters(), lr=rate, momentum=0.9)
    return classifier(clusters, model, optimizer, scheduler=LambdaLR(optimizer, factor))


@task("restarts", "held-out loss")
def moments_cleared(seed: int) -> Problem:
    """An MLP classifier, AdamW; every 150 steps the moments are cleared and the rate restarts."""
    # A new optimizer for each part of the data, at the full rate.
    clusters, model = start(seed)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def before(i: int, _: Any) -> None:
        if i % _CYCLE == 0:
            optimizer.state.clear()

    rate = LambdaLR(optimizer, lambda i: max(0.05, 1 - i % _CYCLE / _CYCLE) if i < STEPS else 0.0)
    return classifier(clusters, model, optimizer, before=before, scheduler=rate)


task(
    "restarts",
    "held-out loss",
    name="longer_cycles",
    about="An MLP classifier, SGD with momentum; warm restarts in cycles that double in length.",
    quick=True,
)(partial(_cycles, factor=_longer, rate=0.2))
task(
    "restarts",
    "held-out loss",
    name="higher_cycles",
    about="The same; four cycles, each from twice the rate of the one before.",
)(partial(_cycles, factor=_higher, rate=0.03))


@task("learning rate by design", "held-out loss")
def lr_restarts(seed: int) -> Problem:
    """An MLP classifier, SGD, cosine schedule with warm restarts at steps 200 and 600 (SGDR)."""
    clusters = Clusters(10, seeded(seed))
    model = mlp(INPUTS, 64, 64, 10)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return supervised(
        model,
        optimizer,
        batches(clusters.sample(1400 * ROWS)),
        [clusters.sample(HELD_OUT)],
        scheduler=CosineAnnealingWarmRestarts(optimizer, T_0=200, T_mult=2),
    )


@task("learning rate by design", "held-out loss")
def rate_raised(seed: int) -> Problem:
    """An MLP classifier, SGD; the rate jumps to 10 times at a third of the run, then decays."""
    steps = 900
    clusters = Clusters(8, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, 8)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)

    def factor(step: int) -> float:
        if step < steps // 3:
            return 1.0
        return 10.0 * (1 - (step - steps // 3) / (steps - steps // 3))

    data, held_out = batches(clusters.sample(steps * ROWS)), [clusters.sample(HELD_OUT)]
    return supervised(model, optimizer, data, held_out, scheduler=LambdaLR(optimizer, factor))
