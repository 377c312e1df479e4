"""Healthy runs with unusual losses: noisy, wrong in part, large or swinging."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, Clusters
from benchmarks.healbench.tasks.models import (
    RowBatches,
    epochs,
    friedman,
    mlp,
    plain_loop,
    seeded,
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
    generator = seeded(seed)
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


@task("noise", "held-out RMSE", quick=True)
def batch_size_1(seed: int) -> Problem:
    """An MLP on Friedman's problem, one example per step, Adam with cosine."""
    return _regression(
        seed,
        lambda model: torch.optim.Adam(model.parameters(), 5e-3),
        rows=4000,
        steps=4000,
        batch_size=1,
    )


@task("noise", "held-out RMSE without noise")
def heavy_tailed(seed: int) -> Problem:
    """Squared error on targets with Student-t noise whose variance is infinite."""
    return _regression(
        seed,
        lambda model: torch.optim.Adam(model.parameters(), 6e-3),
        noise=_student,
        rows=20000,
        noisy_held_out=False,
    )


@task("noise", "held-out RMSE", quick=True)
def summed_loss_sgd(seed: int) -> Problem:
    """Squared error summed over the batch, SGD: gradient norms in the tens and hundreds."""
    return _regression(
        seed,
        lambda model: torch.optim.SGD(model.parameters(), 5e-3),
        reduction="sum",
    )


@task("noise", "held-out RMSE")
def edge_of_stability(seed: int) -> Problem:
    """Full-batch gradient descent at 2 / rate: the loss swings until the rate decays."""
    steps, decay = 1000, 250
    generator = seeded(seed)
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


@task("regularization", "held-out loss")
def over_fitting(seed: int) -> Problem:
    """An MLP classifier learns 512 rows by heart, a tenth of them with wrong labels."""
    generator, rows, steps = seeded(seed), 512, 800
    clusters = Clusters(8, generator, 1.5)
    x, y = clusters.sample(rows)
    other = torch.randint(8, y.shape, generator=generator)
    y = torch.where(torch.rand(rows, generator=generator) < 0.1, other, y)
    held_out, labels = clusters.sample(HELD_OUT)
    model = mlp(INPUTS, 128, 128, 8)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    return plain_loop(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        RowBatches(epochs(rows, steps, 64, generator), x, y),
        optimizer,
        lambda: float(F.cross_entropy(model(held_out), labels)),
        warmup_cosine(optimizer, steps),
    )
