"""Healthy runs with unusual losses: noisy, wrong in part, tiny, negative, large or swinging."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.models import (
    RowBatches,
    epochs,
    friedman,
    mlp,
    plain_loop,
    small_cnn,
    textured_shapes,
    warmup_cosine,
)

_BATCH = 64


def _gaussian(rows: int, generator: torch.Generator) -> Tensor:
    return 0.2 * torch.randn(rows, generator=generator)


def _student(rows: int, generator: torch.Generator) -> Tensor:
    """Student's t with two degrees of freedom: normal over the root of an exponential variable."""
    exponential = -torch.log1p(-torch.rand(rows, generator=generator))
    return 0.3 * torch.randn(rows, generator=generator) / exponential.sqrt()


def _regression(
    seed: int,
    optimize: Callable[[nn.Module], Optimizer],
    noise: Callable[[int, torch.Generator], Tensor] = _gaussian,
    rows: int = 4000,
    steps: int = 1000,
    batch_size: int = _BATCH,
    reduction: str = "mean",
    noisy_held_out: bool = True,
) -> Problem:
    """Friedman's problem with a noise on the targets."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = mlp(10, 32, 32, 1, activation=nn.SiLU)
    x, clean = friedman(rows, generator)
    y = clean + noise(rows, generator)
    held_out, target = friedman(8000, generator)
    if noisy_held_out:
        target = target + noise(8000, generator)
    optimizer = optimize(model)
    return plain_loop(
        model,
        lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1], reduction=reduction),
        RowBatches(epochs(rows, steps, batch_size, generator), x, y),
        optimizer,
        lambda: float(F.mse_loss(model(held_out).squeeze(1), target).sqrt()),
        warmup_cosine(optimizer, steps),
    )


def _batch_size_1(seed: int) -> Problem:
    return _regression(
        seed,
        lambda model: torch.optim.Adam(model.parameters(), 5e-3),
        rows=4000,
        steps=4000,
        batch_size=1,
    )


def _heavy_tailed(seed: int) -> Problem:
    return _regression(
        seed,
        lambda model: torch.optim.Adam(model.parameters(), 6e-3),
        noise=_student,
        rows=20000,
        noisy_held_out=False,
    )


def _summed_loss_sgd(seed: int) -> Problem:
    return _regression(
        seed,
        lambda model: torch.optim.SGD(model.parameters(), 5e-3),
        reduction="sum",
    )


def _label_noise(seed: int) -> Problem:
    steps = 600
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = small_cnn()
    images, labels = textured_shapes(20000, generator, noise=0.2)
    wrong = torch.rand(labels.shape, generator=generator) < 0.3
    other = (labels + torch.randint(1, 10, labels.shape, generator=generator)) % 10
    held_out, held_out_labels = textured_shapes(4000, generator, noise=0.2)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    return plain_loop(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        RowBatches(
            epochs(len(images), steps, _BATCH, generator),
            images,
            torch.where(wrong, other, labels),
        ),
        optimizer,
        lambda: float(F.cross_entropy(model(held_out), held_out_labels)),
        warmup_cosine(optimizer, steps),
    )


def _pendulum_changes(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """States of two coupled pendulums with a torque, and how they change in 5 ms.

    Returns:
        Angles, angular velocities and torque (rows, 5), and the changes of the first four.
    """
    state = 2 * torch.rand(rows, 5, generator=generator) - 1
    angle, velocity, torque = 2 * state[:, :2], 3 * state[:, 2:4], 2 * state[:, 4:]
    pull = 4 * (angle.flip(1) - angle)
    push = torch.cat([torque, torch.zeros_like(torque)], 1)
    acceleration = -9.81 * angle.sin() + pull + push - 0.2 * velocity * velocity.abs()
    turned = 0.005 * (velocity + 0.0025 * acceleration)
    return state, torch.cat([turned, 0.005 * acceleration], 1)


def _tiny_loss(seed: int) -> Problem:
    steps = 1000
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = mlp(5, 48, 48, 4)
    x, y = _pendulum_changes(20000, generator)
    held_out, target = _pendulum_changes(8000, generator)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return plain_loop(
        model,
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        RowBatches(epochs(len(x), steps, _BATCH, generator), x, y),
        optimizer,
        lambda: float(F.mse_loss(model(held_out), target).sqrt() / target.std()),
        warmup_cosine(optimizer, steps),
    )


def _uneven_noise(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Friedman's features, targets whose noise depends on them, and its standard deviation."""
    x, clean = friedman(rows, generator)
    sigma = torch.exp(-2.3 + 0.7 * x[:, 5] - 0.5 * x[:, 0])
    clean = 0.2 * clean
    return x, clean + sigma * torch.randn(rows, generator=generator), sigma


def _negative_loss(seed: int) -> Problem:
    steps = 1000
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 2)

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        mean, log_variance = model(batch[0]).unbind(1)
        return 0.5 * (log_variance + (batch[1] - mean) ** 2 * (-log_variance).exp()).mean()

    x, y, _ = _uneven_noise(20000, generator)
    held_out, target, sigma = _uneven_noise(8000, generator)
    best = float((sigma.log() + 0.5).mean())
    optimizer = torch.optim.Adam(model.parameters(), 8e-3)
    return plain_loop(
        model,
        loss,
        RowBatches(epochs(len(x), steps, _BATCH, generator), x, y),
        optimizer,
        lambda: math.exp(float(loss((held_out, target))) - best),
        warmup_cosine(optimizer, steps),
    )


def _edge_of_stability(seed: int) -> Problem:
    steps, decay = 1000, 250
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = mlp(10, 32, 32, 1, activation=nn.Tanh)
    x, clean = friedman(600, generator)
    y = clean + 0.1 * torch.randn(clean.shape, generator=generator)
    held_out, target = friedman(8000, generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.15)
    return plain_loop(
        model,
        lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        [(x, y)] * steps,
        optimizer,
        lambda: float(F.mse_loss(model(held_out).squeeze(1), target).sqrt()),
        LambdaLR(optimizer, lambda step: min(1.0, (steps - step) / decay)),
    )


def _mixup(seed: int) -> Problem:
    steps, still, warmup = 700, 100, 100
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = small_cnn()
    head = model[-1]
    assert isinstance(head, nn.Linear)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    images, labels = textured_shapes(12000, generator, noise=0.2)
    held_out, held_out_labels = textured_shapes(4000, generator, noise=0.2)
    index = epochs(len(images), steps, _BATCH, generator)
    partner = torch.stack([rows[torch.randperm(_BATCH, generator=generator)] for rows in index])
    # Beta(0.2, 0.2), one per batch as in the authors' code: most batches are hardly mixed.
    # It draws from the global generator, which is seeded above.
    beta = torch.distributions.Beta(0.2, 0.2)
    share = beta.sample((steps,))

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        rows, others, part = batch
        scores = model(part * images[rows] + (1 - part) * images[others])
        own = F.cross_entropy(scores, labels[rows])
        return part * own + (1 - part) * F.cross_entropy(scores, labels[others])

    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)

    def factor(step: int) -> float:
        """Zero while BatchNorm's statistics settle, then a linear warm-up and a cosine."""
        if step < still + warmup:
            return max(0, step - still) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - still - warmup) / (steps - still - warmup)))

    return plain_loop(
        model,
        loss,
        RowBatches(torch.arange(steps), index, partner, share),
        optimizer,
        lambda: float(F.cross_entropy(model(held_out), held_out_labels)),
        LambdaLR(optimizer, factor),
    )


TASKS: tuple[Task, ...] = (
    Task(
        "batch_size_1",
        "healthy",
        "held-out RMSE",
        _batch_size_1,
        "An MLP on Friedman's problem, one example per step, Adam with cosine.",
        quick=True,
    ),
    Task(
        "heavy_tailed",
        "healthy",
        "held-out RMSE without noise",
        _heavy_tailed,
        "Squared error on targets with Student-t noise of two degrees of freedom: its variance "
        "is infinite.",
    ),
    Task(
        "label_noise",
        "healthy",
        "held-out cross entropy",
        _label_noise,
        "A CNN on images of which 30 % carry a wrong label; the held-out labels are right.",
    ),
    Task(
        "tiny_loss",
        "healthy",
        "held-out RMSE, share of the targets' standard deviation",
        _tiny_loss,
        "A dynamics model of two pendulums learns changes within 5 ms: the squared error falls "
        "from 1e-2 to 3e-6.",
    ),
    Task(
        "negative_loss",
        "healthy",
        "exp(held-out loss - loss of the true distribution)",
        _negative_loss,
        "Regression with a learnt variance: a Gaussian log-likelihood that goes far below zero.",
    ),
    Task(
        "summed_loss_sgd",
        "healthy",
        "held-out RMSE",
        _summed_loss_sgd,
        "Squared error summed over the batch, SGD at a rate to match: gradient norms in the tens "
        "and hundreds.",
        quick=True,
    ),
    Task(
        "edge_of_stability",
        "healthy",
        "held-out RMSE",
        _edge_of_stability,
        "Full-batch gradient descent: the sharpness rises to 2 / rate and the loss falls in "
        "swings, until the rate decays over the last quarter.",
    ),
    Task(
        "mixup",
        "healthy",
        "held-out cross entropy",
        _mixup,
        "A CNN with mixup: the rate is zero for 100 steps and the loss flat, then mixed batches "
        "cost far more than others.",
    ),
)
