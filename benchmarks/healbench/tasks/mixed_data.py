"""Healthy runs whose batches come whole from one of several sources, some of them rare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.models import (
    ByteModel,
    byte_corpus,
    held_out_windows,
    mlp,
    plain_loop,
    seeded,
    text_windows,
    warmup_cosine,
)

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

ROWS = 64
INPUTS = 16
HELD_OUT = 8192
LENGTH = 16
LANGUAGE_ROWS = 16


class Clusters:
    """Classes of three Gaussian clusters each, which no linear model can separate.

    Args:
        classes: number of classes.
        generator: draws the centres, and later the rows.
        spread: standard deviation of the centres; that of a cluster is 1.
    """

    def __init__(self, classes: int, generator: torch.Generator, spread: float = 1.0) -> None:
        self.generator = generator
        self.centres = spread * torch.randn(classes, 3, INPUTS, generator=generator)

    def inputs(self, labels: Tensor) -> Tensor:
        """One row (INPUTS,) for each label."""
        cluster = torch.randint(3, labels.shape, generator=self.generator)
        noise = torch.randn(*labels.shape, INPUTS, generator=self.generator)
        return self.centres[labels, cluster] + noise

    def sample(self, rows: int) -> Batch:
        """Inputs and labels, all classes equally likely."""
        labels = torch.randint(len(self.centres), (rows,), generator=self.generator)
        return self.inputs(labels), labels


class Teacher:
    """A random network whose outputs are the targets: mean 0, variance 1 on normal inputs.

    Args:
        generator: draws the weights, and later the rows.
        frequency: factor on the inputs; higher means a rougher function.
    """

    def __init__(self, generator: torch.Generator, frequency: float = 1.5) -> None:
        self.generator = generator
        self.inner = frequency / INPUTS**0.5 * torch.randn(INPUTS, 32, generator=generator)
        self.outer = torch.randn(32, 1, generator=generator)
        outputs = self.raw(torch.randn(HELD_OUT, INPUTS, generator=generator))
        self.mean, self.scale = outputs.mean(), outputs.std()

    def raw(self, inputs: Tensor) -> Tensor:
        """The network, not normalised."""
        return torch.sin(inputs @ self.inner) @ self.outer

    def __call__(self, inputs: Tensor) -> Tensor:
        """The targets (rows, 1)."""
        return (self.raw(inputs) - self.mean) / self.scale

    def sample(self, rows: int, noise: float = 0.0) -> Batch:
        """Normal inputs and their targets, with normal noise of the given standard deviation."""
        inputs = torch.randn(rows, INPUTS, generator=self.generator)
        return inputs, self(inputs) + noise * torch.randn(rows, 1, generator=self.generator)


def batches(data: Batch, rows: int = ROWS) -> list[Batch]:
    """The data, in order, in batches of `rows`."""
    return list(zip(data[0].split(rows), data[1].split(rows), strict=True))


def supervised(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Batch],
    held_out: Sequence[Batch],
    loss: Loss = F.cross_entropy,
    scheduler: LRScheduler | None = None,
) -> Problem:
    """The ordinary loop over inputs and targets; the metric is the mean over the held-out sets."""

    def mean_loss(batch: Batch) -> Tensor:
        return loss(model(batch[0]), batch[1])

    def evaluate() -> float:
        return sum(float(mean_loss(batch)) for batch in held_out) / len(held_out)

    return plain_loop(model, mean_loss, data, optimizer, evaluate, scheduler)


def _rare(steps: int, every: int, generator: torch.Generator) -> list[bool]:
    """True at one random step of each `every`."""
    at = torch.randint(every, (steps // every,), generator=generator)
    rare = set((torch.arange(len(at)) * every + at).tolist())
    return [step in rare for step in range(steps)]


def _rare_class(seed: int, every: int, steps: int) -> Problem:
    """Four classes mixed in every batch, and a fifth that comes only in batches of its own."""
    generator, classes = seeded(seed), 5
    clusters = Clusters(classes, generator, 1.2)
    rare = torch.tensor(_rare(steps, every, generator)).repeat_interleave(ROWS)
    labels = torch.randint(classes - 1, (steps * ROWS,), generator=generator)
    labels[rare] = classes - 1
    model = mlp(INPUTS, 64, 64, classes)
    optimizer = AdamW(model.parameters(), lr=6e-3)
    return supervised(
        model,
        optimizer,
        batches((clusters.inputs(labels), labels)),
        [clusters.sample(HELD_OUT)],
        scheduler=warmup_cosine(optimizer, steps),
    )


@task("mixes", "held-out loss on the second language, nats per byte", quick=True)
def rare_language_100(seed: int) -> Problem:
    """A byte-level transformer; 1 in 100 batches is in a second alphabet."""
    # The second language is other text of the same library, in an alphabet of its own.
    generator, steps = seeded(seed), 1200
    alphabet = 128 + torch.randperm(128, generator=generator)
    held_out = alphabet[held_out_windows(1024, LENGTH) % 128]
    data = [text_windows(byte_corpus()[0], LANGUAGE_ROWS, LENGTH, generator) for _ in range(steps)]
    rare = _rare(steps, 100, generator)
    data = [alphabet[each % 128] if odd else each for each, odd in zip(data, rare, strict=True)]
    model = ByteModel(width=32, layers=1, context=LENGTH)
    optimizer = AdamW(model.parameters(), lr=5e-3)
    scheduler = warmup_cosine(optimizer, steps, warmup=20)
    return plain_loop(
        model, model.loss, data, optimizer, lambda: float(model.loss(held_out)), scheduler
    )


for _every, _steps in ((12, 1200), (60, 1800), (300, 3000)):
    task(
        "mixes",
        "held-out loss, all classes equally",
        name=f"rare_class_{_every}",
        about=f"An MLP classifier; one of five classes comes only in whole batches, 1 in {_every}.",
        quick=_every < 300,
    )(partial(_rare_class, every=_every, steps=_steps))


@task("mixes", "held-out error against noise-free targets")
def losses_1_and_20(seed: int) -> Problem:
    """Regression by an MLP; each batch is from one of two sources with losses of 1 and 20."""
    # Both sources have the same function; targets of the loud one are noisier. Noise of variance 1
    # and 20 is what nobody can learn, so losses stay near 1 and 20.
    generator, steps = seeded(seed), 800
    teacher = Teacher(generator, 0.7)
    loud = torch.rand(steps, generator=generator) < 0.5
    data = [teacher.sample(ROWS, noise=20**0.5 if each else 1.0) for each in loud]
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    scheduler = warmup_cosine(optimizer, steps)
    return supervised(model, optimizer, data, [teacher.sample(HELD_OUT)], F.mse_loss, scheduler)


@task("mixes", "held-out error against noise-free targets")
def loud_15pct(seed: int) -> Problem:
    """The same; 15 % of the batches, drawn independently, have 20 times the loss and norm."""
    # 15 % of the batches count 20 times, as importance weights of a rare source do.
    generator, steps = seeded(seed), 800
    teacher = Teacher(generator, 0.7)
    weights = torch.where(torch.rand(steps, generator=generator) < 0.15, 20.0, 1.0)
    data = []
    for weight in weights:
        inputs, targets = teacher.sample(ROWS, noise=0.5)
        data.append((inputs, torch.cat([targets, weight.expand(ROWS, 1)], dim=1)))
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    inputs, targets = teacher.sample(HELD_OUT)
    held_out = (inputs, torch.cat([targets, torch.ones(HELD_OUT, 1)], dim=1))

    def loss(outputs: Tensor, batch: Tensor) -> Tensor:
        return (batch[:, 1:] * (outputs - batch[:, :1]).square()).mean()

    return supervised(model, optimizer, data, [held_out], loss, warmup_cosine(optimizer, steps))
