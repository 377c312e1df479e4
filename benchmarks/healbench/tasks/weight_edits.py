"""Healthy runs whose own loop edits the weights: pruning, quantization, averaging.

An edit that happens once follows a counter of the loop, as `if step == 400` in a user's script. The
counter is in no checkpoint: a run that is rolled back past the edit trains on without the edit,
and the deployed model, which `evaluate` edits again, was not trained for it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import classifier
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    batches,
    seeded,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, warmup_cosine
from benchmarks.healbench.tasks.sick_state import damaged_once

_STEPS = 800
_EDIT = 400
_CLASSES = 8


def _rounded(weight: Tensor, bits: int) -> Tensor:
    """Symmetric uniform quantization of a tensor."""
    unit = weight.detach().abs().max().clamp(min=1e-8) / (2 ** (bits - 1) - 1)
    return (weight / unit).round() * unit


def _classifier(model: nn.Module, optimizer: Optimizer, clusters: Clusters) -> Problem:
    data = batches(clusters.sample(_STEPS * ROWS))
    scheduler = warmup_cosine(optimizer, _STEPS)
    return supervised(model, optimizer, data, [clusters.sample(HELD_OUT)], scheduler=scheduler)


def _edited_once(seed: int, keep: float, bits: int) -> Problem:
    """The hidden layer's weights are edited once and held there; the other layers adapt."""
    clusters = Clusters(_CLASSES, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, _CLASSES)
    problem = _classifier(model, AdamW(model.parameters(), lr=5e-3), clusters)
    hidden: Any = model[2]

    @torch.no_grad()
    def edit(_: Problem) -> None:
        weight = hidden.weight
        if keep < 1:
            smallest = torch.quantile(weight.abs(), 1 - keep)
            weight.mul_(weight.abs() >= smallest)
        weight.copy_(_rounded(weight, bits))
        weight.requires_grad_(False)

    evaluate = problem.evaluate

    def deployed() -> float:
        if float(hidden.weight.unique().numel()) > 2**bits:
            edit(problem)
        return evaluate()

    problem.evaluate = deployed
    return damaged_once(problem, _EDIT, edit)


def _pruned_once(seed: int) -> Problem:
    return _edited_once(seed, keep=0.1, bits=8)


def _quantized_once(seed: int) -> Problem:
    return _edited_once(seed, keep=1.0, bits=2)


class _FakeQuantized(nn.Module):
    """An MLP whose weights are rounded in the forward pass once the buffer `on` is set."""

    on: Tensor

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(*pair) for pair in ((INPUTS, 64), (64, 64), (64, _CLASSES))
        )
        self.register_buffer("on", torch.zeros(()))
        self.bits = bits

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, nn.Linear)
            weight = layer.weight
            change = (_rounded(weight, self.bits) - weight).detach()  # straight-through gradient
            x = F.linear(torch.relu(x) if number else x, weight + self.on * change, layer.bias)
        return x


def _qat_sgd(seed: int) -> Problem:
    clusters = Clusters(_CLASSES, seeded(seed), 1.5)
    model = _FakeQuantized(bits=3)
    problem = _classifier(model, SGD(model.parameters(), lr=0.1, momentum=0.9), clusters)

    def switch_on(_: Problem) -> None:
        model.on.fill_(1.0)

    evaluate = problem.evaluate

    def deployed() -> float:
        switch_on(problem)
        return evaluate()

    problem.evaluate = deployed
    return damaged_once(problem, _EDIT, switch_on)


def _average_swap(seed: int) -> Problem:
    """Every 100 steps the weights are replaced by their running mean, whatever the moments."""
    clusters = Clusters(_CLASSES, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, _CLASSES)
    mean = deepcopy(model).requires_grad_(False)

    def after(i: int, _: Any) -> None:
        for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.02)
            if i % 100 == 99:
                fast.copy_(slow)

    data = batches(clusters.sample(_STEPS * ROWS))
    optimizer = AdamW(model.parameters(), lr=2e-2)
    return classifier(clusters, model, optimizer, data=data, after=after, modules={"mean": mean})


TASKS: tuple[Task, ...] = (
    Task(
        "pruned_once",
        "healthy",
        "held-out loss of the pruned model",
        _pruned_once,
        "An MLP classifier, AdamW; after 400 steps nine tenths of the hidden layer's weights are "
        "removed, and the rest of the model adapts.",
    ),
    Task(
        "quantized_once",
        "healthy",
        "held-out loss of the quantized model",
        _quantized_once,
        "The same; after 400 steps the hidden layer's weights are rounded to 2 bits and frozen.",
    ),
    Task(
        "qat_sgd",
        "healthy",
        "held-out loss of the quantized model",
        _qat_sgd,
        "The same, SGD with momentum; from step 400 on all weights are rounded to 3 bits in the "
        "forward pass.",
    ),
    Task(
        "average_swap",
        "healthy",
        "held-out loss",
        _average_swap,
        "The same, AdamW; every 100 steps the weights are replaced by their running mean.",
    ),
)
