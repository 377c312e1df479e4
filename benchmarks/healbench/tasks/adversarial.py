"""Adversarial training: two optimizers, and losses that do not show how good the run is."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, Update, task
from benchmarks.healbench.tasks.models import mlp

_SIZE = 8
_LATENT = 8
_HELD_OUT = 4096


class _Mixture:
    """Five normal clusters at random places, and the random numbers of a run.

    Args:
        seed: of both.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.centres = torch.randn(5, _SIZE, generator=self.generator)

    def draw(self, *shape: int) -> Tensor:
        """Samples, (*shape, _SIZE)."""
        which = torch.randint(len(self.centres), shape, generator=self.generator)
        return self.centres[which] + 0.1 * torch.randn(*shape, _SIZE, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        """The input of a generator, (*shape, _LATENT)."""
        return torch.randn(*shape, _LATENT, generator=self.generator)


def _decay(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    """Constant for the first half, then linear to zero."""
    return LambdaLR(optimizer, lambda i: min(1.0, 2.0 * max(0.0, 1.0 - i / updates)))


@torch.no_grad()
def _average(mean: nn.Module, model: nn.Module, rate: float) -> None:
    """One step of an exponential moving average of weights."""
    for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, rate)


@torch.no_grad()
def _energy_score(made: Tensor, real: Tensor) -> float:
    """E|x - y| - E|x - x'| / 2 for made x and real y: least where both are distributed alike.

    Half the energy distance plus a constant of the data (Gneiting and Raftery 2007, section 4.2).
    It does not come near zero, so that its ratios mean something.
    """
    count = len(made)
    within = torch.cdist(made, made).sum() / (count * (count - 1))
    return float(torch.cdist(made, real).mean() - within / 2)


def _slope(network: nn.Module, at: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and their gradients with respect to the inputs, for a penalty."""
    at = at.detach().requires_grad_()
    value = network(at)
    (slope,) = torch.autograd.grad(value.sum(), at, create_graph=True)
    return value, slope


@task("rises by design", "energy score", quick=True)
def gan(seed: int) -> Problem:
    """Non-saturating GAN: the generator's loss rises while its samples get better."""
    torch.manual_seed(seed)
    steps, batch = 800, 128
    mixture = _Mixture(seed)
    real = mixture.draw(steps, batch)
    noise = mixture.noise(steps, 2, batch)
    held_out, held_noise = mixture.draw(_HELD_OUT), mixture.noise(_HELD_OUT)
    leaky = partial(nn.LeakyReLU, 0.2)
    generator = mlp(_LATENT, 64, 64, _SIZE, activation=leaky)
    discriminator = mlp(_SIZE, 64, 64, 1, activation=leaky)
    mean = deepcopy(generator).requires_grad_(False)
    optimizers: dict[str, torch.optim.Optimizer] = {
        "generator": torch.optim.Adam(generator.parameters(), lr=7e-4, betas=(0.5, 0.99)),
        "discriminator": torch.optim.Adam(discriminator.parameters(), lr=7e-4, betas=(0.5, 0.99)),
    }

    def step(batch: tuple[Tensor, Tensor], update: Update) -> None:
        data, latent = batch
        with torch.no_grad():
            made = generator(latent[0])
        genuine, slope = _slope(discriminator, data)
        penalty = 0.03 * slope.square().sum(1).mean()
        forged = discriminator(made)
        loss = F.softplus(-genuine).mean() + F.softplus(forged).mean() + penalty
        update(loss, "discriminator")
        update(F.softplus(-discriminator(generator(latent[1]))).mean(), "generator")
        _average(mean, generator, 0.01)

    return Problem(
        modules={"generator": generator, "discriminator": discriminator, "mean": mean},
        optimizers=optimizers,
        schedulers={name: _decay(optimizer, steps) for name, optimizer in optimizers.items()},
        batches=list(zip(real, noise, strict=True)),
        step=step,
        evaluate=lambda: _energy_score(mean(held_noise), held_out),
    )
