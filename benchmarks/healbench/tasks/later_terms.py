"""Healthy runs that add terms to the loss after `healer.loss(batch)` has observed it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, classifier, program, start
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    Teacher,
    batches,
    seeded,
)
from benchmarks.healbench.tasks.models import mlp

_CHANGE = STEPS // 2


def _auxiliary(seed: int) -> Problem:
    """A second head with large targets, from half time on."""
    generator = seeded(seed)
    clusters, teacher = Clusters(CLASSES, generator, 1.5), Teacher(generator, 0.7)
    model = mlp(INPUTS, 64, 64, CLASSES + 1)
    inputs, labels = clusters.sample(STEPS * ROWS)
    values = 12 + 6 * teacher(inputs)[:, 0]
    weight = (torch.arange(STEPS * ROWS) >= _CHANGE * ROWS).float()
    data = [
        *zip(*(each.split(ROWS) for each in (inputs, labels, values, weight)), strict=True)
    ]  # fmt: skip
    held_out, held_out_labels = clusters.sample(HELD_OUT)

    def term(batch: tuple[Tensor, ...]) -> Tensor:
        x, _, value, weight = batch
        return (weight * (model(x)[:, -1] - value).square()).mean()

    return program(
        model,
        AdamW(model.parameters(), lr=5e-3),
        data,
        lambda batch: F.cross_entropy(model(batch[0])[:, :-1], batch[1]),
        lambda: float(F.cross_entropy(model(held_out)[:, :-1], held_out_labels)),
        term=term,
    )


def _annealed_divergence(seed: int) -> Problem:
    """A VAE whose `loss_fn` is the reconstruction; the divergence comes in cycles of 150 steps."""
    generator = seeded(seed)
    clusters = Clusters(CLASSES, generator, 1.5)
    model = torch.nn.ModuleDict({"encoder": mlp(INPUTS, 64, 16), "decoder": mlp(8, 64, INPUTS)})
    noise = torch.randn(STEPS, ROWS, 8, generator=generator)
    data = [
        (x, noise[i], min(1.0, i % 150 / 75))
        for i, (x, _) in enumerate(batches(clusters.sample(STEPS * ROWS)))
    ]
    held_out = clusters.sample(HELD_OUT)[0]

    def parts(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = model["encoder"](x).chunk(2, dim=1)
        made = model["decoder"](mean + noise * (0.5 * log_variance).exp())
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean()
        return 0.5 * (made - x).square().sum(1).mean(), divergence

    return program(
        model,
        AdamW(model.parameters(), lr=3e-3),
        data,
        lambda batch: parts(batch[0], batch[1])[0],
        lambda: float(sum(parts(held_out, torch.zeros(HELD_OUT, 8)))),
        term=lambda batch: batch[2] * parts(batch[0], batch[1])[1],
    )


def _adversarial(seed: int) -> Problem:
    """Goodfellow et al. (2015): from half time on the loss on moved inputs is added."""
    clusters, model = start(seed)
    data = [(x, y, i >= _CHANGE) for i, (x, y) in enumerate(batches(clusters.sample(STEPS * ROWS)))]

    def term(batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        x, y, on = batch
        if not on:
            return torch.zeros(())
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return F.cross_entropy(model((x + 0.5 * slope.sign()).detach()), y)

    return classifier(clusters, model, data=data, term=term)


TASKS: tuple[Task, ...] = (
    Task(
        "auxiliary_head",
        "healthy",
        "held-out loss of the classes",
        _auxiliary,
        "An MLP classifier; from half time on the loop adds the large loss of a second head.",
        quick=True,
    ),
    Task(
        "annealed_divergence",
        "healthy",
        "held-out bound, nats",
        _annealed_divergence,
        "A VAE; the loop adds the divergence with a weight that rises in cycles.",
    ),
    Task(
        "adversarial_term",
        "healthy",
        "held-out loss",
        _adversarial,
        "An MLP classifier; from half time on the loop adds the loss on adversarial inputs.",
    ),
)
