"""Healthy runs in which noise, mixing or small batches are switched on at half time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, classifier, noise_like, start
from benchmarks.healbench.tasks.mixed_data import ROWS, batches

_CHANGE = STEPS // 2
_METRIC = "held-out loss"


@task("noise switched on", _METRIC)
def mixup_on(seed: int) -> Problem:
    """An MLP classifier; from half time on rows and labels are mixed in pairs."""
    # Zhang et al. (2018).
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


@task("noise switched on", _METRIC)
def small_batches_on(seed: int) -> Problem:
    """An MLP classifier; from half time on a batch has 4 instead of 64 rows."""
    clusters, model = start(seed)
    large = batches(clusters.sample(_CHANGE * ROWS))
    small = batches(clusters.sample(_CHANGE * 4), rows=4)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return classifier(clusters, model, optimizer, data=[*large, *small])


@task("noise switched on", _METRIC)
def noisy_inputs_on(seed: int) -> Problem:
    """An MLP classifier; from half time on the inputs have noise of twice their own spread."""
    clusters, model = start(seed)
    data = batches(clusters.sample(STEPS * ROWS))
    late = [(x + 2 * noise_like(x, i), y) for i, (x, y) in enumerate(data[_CHANGE:])]
    return classifier(clusters, model, data=data[:_CHANGE] + late)


@task("noise switched on", _METRIC)
def dropout_on(seed: int) -> Problem:
    """An MLP classifier; from half time on half of the hidden units are dropped."""
    clusters, model = start(seed)
    dropout = nn.Dropout(0.0)
    model.insert(4, dropout)

    def before(i: int, _: Any) -> None:
        dropout.p = 0.5 if i >= _CHANGE else 0.0

    return classifier(clusters, model, before=before)


@task("noise switched on", _METRIC)
def weight_noise_on(seed: int) -> Problem:
    """An MLP classifier; from half time on noise is added to the weights after each step."""
    # Langevin dynamics: normal noise on each weight after each step, less towards the end.
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i >= _CHANGE:
            for number, weight in enumerate(model.parameters()):
                scale = 0.02 * (1 - i / STEPS)
                weight.add_(scale * noise_like(weight, 100 * i + number))

    return classifier(clusters, model, after=after)
