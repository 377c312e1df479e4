"""Healthy runs whose own loop edits the weights: pruning, quantization, averaging, resets.

An edit that happens once follows a counter of the loop, as `if step == 400` in a user's script. The
counter is in no checkpoint: a run that is rolled back past the edit trains on without the edit,
and the deployed model, which `evaluate` edits again, was not trained for it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import STEPS, classifier, damaged_once, noise_like, start
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    batches,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

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


@task("weight edits", "held-out loss of the pruned model")
def pruned_once(seed: int) -> Problem:
    """An MLP classifier; after 400 steps nine tenths of a layer's weights are removed."""
    return _edited_once(seed, keep=0.1, bits=8)


@task("weight edits", "held-out loss of the quantized model")
def quantized_once(seed: int) -> Problem:
    """The same; after 400 steps the hidden layer's weights are rounded to 2 bits and frozen."""
    return _edited_once(seed, keep=1.0, bits=2)


@task("weight edits", "held-out loss")
def average_swap(seed: int) -> Problem:
    """The same, AdamW; every 100 steps the weights are replaced by their running mean."""
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


# -- re-initialised and pruned on the way ----------------------------------------------------------

_METRIC = "held-out loss"
RESET = STEPS // 2


@task("weight edits", _METRIC, quick=True)
def head_reset(seed: int) -> Problem:
    """An MLP classifier whose last layer is zeroed at half time."""
    # As before fine-tuning: the loop's own counter says when.
    clusters, model = start(seed)
    head: Any = model[4]

    @torch.no_grad()
    def reset(_: Problem) -> None:
        head.weight.zero_()
        head.bias.zero_()

    return damaged_once(classifier(clusters, model), RESET, reset)


@task("weight edits", _METRIC)
def shrink_perturb(seed: int) -> Problem:
    """The same; weights times 0.4 and noise, three times."""
    # Ash and Adams (2020), as each new part of the data comes.
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i % 150 == 149 and i < STEPS - 1:
            for number, weight in enumerate(model.parameters()):
                weight.mul_(0.4).add_(0.02 * noise_like(weight, 100 * i + number))

    return classifier(clusters, model, after=after)


@task("weight edits", _METRIC)
def gradual_pruning(seed: int) -> Problem:
    """The same; magnitude pruning in steps to 80 %."""
    # Zhu and Gupta (2017): a cubic schedule to 80 %, and masks that hold.
    clusters, model = start(seed)
    masks = deepcopy(model).requires_grad_(False)
    matrices = [w for w in model.parameters() if w.ndim == 2]
    kept = [m for m in masks.parameters() if m.ndim == 2]
    for mask in kept:
        nn.init.ones_(mask)

    def after(i: int, _: Any) -> None:
        for weight, mask in zip(matrices, kept, strict=True):
            if 150 <= i <= 450 and i % 50 == 0:
                share = 0.8 * (1 - (1 - (i - 150) / 300) ** 3)
                mask.copy_(weight.abs() > torch.quantile(weight.abs(), share))
            weight.mul_(mask)

    return classifier(clusters, model, after=after, modules={"masks": masks})
