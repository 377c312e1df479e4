"""Healthy runs in which noise, mixing or small batches are switched on at half time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, classifier, noise_like, start
from benchmarks.healbench.tasks.mixed_data import ROWS, batches

_CHANGE = STEPS // 2
_METRIC = "held-out loss"


def _mixup(seed: int) -> Problem:
    """Zhang et al. (2018): pairs of rows are mixed, and so are their labels."""
    clusters, model = start(seed)
    data = []
    for i, (x, y) in enumerate(batches(clusters.sample(STEPS * ROWS))):
        target = F.one_hot(y, CLASSES).float()
        if i >= _CHANGE:
            share = torch.rand(ROWS, 1, generator=clusters.generator)
            other = torch.randperm(ROWS, generator=clusters.generator)
            x, target = (share * each + (1 - share) * each[other] for each in (x, target))
        data.append((x, target))
    return classifier(clusters, model, data=data)


def _small_batches(seed: int) -> Problem:
    clusters, model = start(seed)
    large = batches(clusters.sample(_CHANGE * ROWS))
    small = batches(clusters.sample(_CHANGE * 4), rows=4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return classifier(clusters, model, optimizer, data=[*large, *small])


def _noisy_inputs(seed: int) -> Problem:
    clusters, model = start(seed)
    data = batches(clusters.sample(STEPS * ROWS))
    late = [(x + 2 * noise_like(x, i), y) for i, (x, y) in enumerate(data[_CHANGE:])]
    return classifier(clusters, model, data=data[:_CHANGE] + late)


def _dropout(seed: int) -> Problem:
    clusters, model = start(seed)
    dropout = nn.Dropout(0.0)
    model.insert(4, dropout)

    def before(i: int, _: Any) -> None:
        dropout.p = 0.5 if i >= _CHANGE else 0.0

    return classifier(clusters, model, before=before)


def _label_smoothing(seed: int) -> Problem:
    clusters, model = start(seed)
    data = batches(clusters.sample(STEPS * ROWS))
    data = [(x, y, 0.2 * (i >= _CHANGE)) for i, (x, y) in enumerate(data)]

    def loss_fn(batch: tuple[Tensor, Tensor, float]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=batch[2])

    return classifier(clusters, model, data=data, loss_fn=loss_fn)


def _weight_noise(seed: int) -> Problem:
    """Langevin dynamics: normal noise on each weight after each step, less towards the end."""
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i >= _CHANGE:
            for number, weight in enumerate(model.parameters()):
                scale = 0.02 * (1 - i / STEPS)
                weight.add_(scale * noise_like(weight, 100 * i + number))

    return classifier(clusters, model, after=after)


TASKS: tuple[Task, ...] = tuple(
    Task(name, "healthy", _METRIC, build, f"An MLP classifier; from half time on {what}.")
    for name, build, what in (
        ("mixup_on", _mixup, "rows and labels are mixed in pairs"),
        ("small_batches_on", _small_batches, "a batch has 4 instead of 64 rows"),
        ("noisy_inputs_on", _noisy_inputs, "the inputs have noise of twice their own spread"),
        ("dropout_on", _dropout, "half of the hidden units are dropped"),
        ("label_smoothing_on", _label_smoothing, "the labels are smoothed by 0.2"),
        ("weight_noise_on", _weight_noise, "noise is added to the weights after each step"),
    )
)
