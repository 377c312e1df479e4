"""Healthy runs with restarts: of the rate, in longer or higher cycles, and of the moments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import STEPS, classifier, start

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


def _moments_cleared(seed: int) -> Problem:
    """A new optimizer for each part of the data, at the full rate."""
    clusters, model = start(seed)
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def before(i: int, _: Any) -> None:
        if i % _CYCLE == 0:
            optimizer.state.clear()

    rate = LambdaLR(optimizer, lambda i: max(0.05, 1 - i % _CYCLE / _CYCLE) if i < STEPS else 0.0)
    return classifier(clusters, model, optimizer, before=before, scheduler=rate)


TASKS: tuple[Task, ...] = (
    Task(
        "longer_cycles",
        "healthy",
        "held-out loss",
        lambda seed: _cycles(seed, _longer, 0.2),
        "An MLP classifier, SGD with momentum; warm restarts in cycles that double in length.",
        quick=True,
    ),
    Task(
        "higher_cycles",
        "healthy",
        "held-out loss",
        lambda seed: _cycles(seed, _higher, 0.03),
        "The same; four cycles, each from twice the rate of the one before.",
    ),
    Task(
        "moments_cleared",
        "healthy",
        "held-out loss",
        _moments_cleared,
        "The same, AdamW; every 150 steps the moments are cleared and the rate restarts.",
    ),
)
