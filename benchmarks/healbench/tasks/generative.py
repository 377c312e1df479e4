"""Healthy runs of models with a likelihood: losses below zero, and losses in the hundreds."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.models import (
    RowBatches,
    epochs,
    mlp,
    plain_loop,
    seeded,
    textured_shapes,
    warmup_cosine,
)


class _RealNVP(nn.Module):
    """Affine couplings on alternating halves, to a standard normal (Dinh et al. 2017).

    Args:
        dims: of the data; even.
        couplings: how many.
        width: of the MLP in each.
    """

    def __init__(self, dims: int, couplings: int = 6, width: int = 32) -> None:
        super().__init__()
        self.first = dims // 2
        self.couplings = nn.ModuleList(
            mlp(self.first, width, width, dims, activation=nn.Tanh) for _ in range(couplings)
        )

    def loss(self, x: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats of the rows of `x` (rows, dims)."""
        kept, moved = x.split(self.first, 1)
        log_volume = torch.zeros(len(x))
        for coupling in self.couplings:
            raw, shift = coupling(kept).chunk(2, 1)
            log_scale = 2 * torch.tanh(raw / 2)
            log_volume = log_volume + log_scale.sum(1)
            kept, moved = moved * log_scale.exp() + shift, kept
        z = torch.cat([kept, moved], 1)
        log_normal = -0.5 * (z**2 + math.log(2 * math.pi)).sum(1)
        return -(log_normal + log_volume).mean()


def _curve_points(rows: int, generator: torch.Generator) -> Tensor:
    """Points near two thin sheets in four dimensions: most densities are far above 1.

    Returns:
        float32 (rows, 4).
    """
    angle = math.pi * torch.rand(rows, generator=generator)
    side = torch.randint(2, (rows,), generator=generator) * 2.0 - 1
    x = side * (torch.cos(angle) - 0.5)
    y = side * (torch.sin(angle) - 0.25)
    points = torch.stack([x, y, torch.sin(2 * x) * y, x * y], 1)
    width = torch.tensor([0.1, 0.1, 0.05, 0.05])
    return points + width * torch.randn(rows, 4, generator=generator)


@task("likelihoods", "held-out perplexity per dimension", quick=True)
def flow(seed: int) -> Problem:
    """RealNVP on points near two thin sheets: a log-likelihood loss that goes below zero."""
    steps, dims = 700, 4
    generator = seeded(seed)
    model = _RealNVP(dims)
    points = _curve_points(20000, generator)
    held_out = _curve_points(10000, generator)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return plain_loop(
        model,
        lambda batch: model.loss(batch[0]),
        RowBatches(epochs(len(points), steps, 128, generator), points),
        optimizer,
        lambda: math.exp(float(model.loss(held_out)) / dims),
        warmup_cosine(optimizer, steps),
    )


class _VAE(nn.Module):
    """Variational autoencoder of images as pixel probabilities (Kingma & Welling 2014).

    Args:
        latent: dimensions of the code.
        width: of both MLPs.
    """

    def __init__(self, latent: int = 8, width: int = 64) -> None:
        super().__init__()
        self.encoder = mlp(256, width, 2 * latent)
        self.decoder = mlp(latent, width, 256)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels (rows, 256), and the code's mean and log variance.

        Args:
            images: (rows, 256) in [0, 1].
            noise: standard normal (rows, latent).
        """
        mean, log_variance = self.encoder(images).chunk(2, 1)
        return self.decoder(mean + noise * (0.5 * log_variance).exp()), mean, log_variance


def _summed(model: _VAE, images: Tensor, noise: Tensor) -> Tensor:
    """The negative evidence bound in nats per image: summed over pixels and code."""
    logits, mean, log_variance = model(images, noise)
    likelihood = F.binary_cross_entropy_with_logits(logits, images, reduction="sum")
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return (likelihood + divergence) / len(images)


@task("likelihoods", "held-out negative evidence bound, nats", quick=True)
def vae_sum(seed: int) -> Problem:
    """A VAE whose likelihood is summed over pixels: losses in the hundreds, norms far above 1."""
    steps, rows = 1000, 64
    generator = seeded(seed)
    model = _VAE()
    images = textured_shapes(6000, generator, noise=0.0)[0].flatten(1)
    noise = torch.randn(steps, rows, 8, generator=generator)
    held_out = textured_shapes(6000, generator, noise=0.0)[0].flatten(1)
    held_out_noise = torch.randn(len(held_out), 8, generator=generator)
    index = epochs(len(images), steps, rows, generator)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    return plain_loop(
        model,
        lambda batch: _summed(model, images[batch[0]], batch[1]),
        RowBatches(torch.arange(steps), index, noise),
        optimizer,
        lambda: float(_summed(model, held_out, held_out_noise)),
        warmup_cosine(optimizer, steps),
    )
