"""Healthy runs whose inputs or targets change scale: loss and norms change too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch.optim import Adam

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, ROWS, Batch, Teacher, supervised
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

_STEPS = 800

Scale = Callable[[float], float]
"""Scale of the data at a share of the run: 0 is its first step, 1 its last."""


def _one(_: float) -> float:
    return 1.0


def _exponential(progress: float) -> float:
    return 10000.0**progress


def _another_unit(progress: float) -> float:
    return 1.0 if progress < 0.5 else 30.0


def _steps_up(progress: float) -> float:
    return 4.0 ** int(4 * min(progress, 0.99))


def _scaled(seed: int, inputs: Scale, targets: Scale, rate: float) -> Problem:
    """Regression by an MLP. The metric is relative to the targets' scale at the end."""
    teacher = Teacher(seeded(seed), 0.7)

    def scaled(batch: Batch, progress: float) -> Batch:
        return inputs(progress) * batch[0], targets(progress) * batch[1]

    data = [scaled(teacher.sample(ROWS, noise=0.1), i / (_STEPS - 1)) for i in range(_STEPS)]
    held_out = scaled(teacher.sample(HELD_OUT), 1.0)
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=rate)
    scheduler = warmup_cosine(optimizer, _STEPS, floor=0.1)
    problem = supervised(model, optimizer, data, [held_out], F.mse_loss, scheduler)
    mean_square = problem.evaluate
    variance = float(torch.var(held_out[1]))
    problem.evaluate = lambda: mean_square() / variance
    return problem


def _task(name: str, inputs: Scale, targets: Scale, rate: float, about: str) -> None:
    metric = "held-out error, share of the variance"
    register = task("scale changes", metric, name=name, about=about)
    register(partial(_scaled, inputs=inputs, targets=targets, rate=rate))


_task(
    "targets_grow_10000x",
    _one,
    _exponential,
    1e-2,
    "Regression by an MLP, Adam; the targets grow exponentially, to 10000 times their scale.",
)
_task(
    "targets_in_stages",
    _one,
    _steps_up,
    1e-2,
    "The same; the targets are multiplied by 4 three times, every 200 steps.",
)
_task(
    "unit_of_inputs_30x",
    _another_unit,
    _one,
    3e-3,
    "The same; at half of the run the inputs come in another unit and are 30 times as large.",
)
