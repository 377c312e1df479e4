"""Healthy runs whose batches come whole from one of several sources, some of them rare."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.healbench.problem import MAIN, Problem, Task, Update
from benchmarks.healbench.tasks.models import (
    ByteModel,
    byte_corpus,
    held_out_windows,
    mlp,
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


def seeded(seed: int) -> torch.Generator:
    """The generator of a task's data; the initial weights follow the same seed."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


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

    def loss_fn(batch: Batch) -> Tensor:
        return loss(model(batch[0]), batch[1])

    def step(batch: Batch, update: Update) -> None:
        update(loss_fn(batch))

    @torch.no_grad()
    def evaluate() -> float:
        return sum(float(loss_fn(batch)) for batch in held_out) / len(held_out)

    return Problem(
        modules={"model": model},
        optimizers={MAIN: optimizer},
        batches=data,
        step=step,
        evaluate=evaluate,
        schedulers={} if scheduler is None else {MAIN: scheduler},
        loss_fn=loss_fn,
    )


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


def _language_model(data: list[Tensor], held_out: list[Tensor], entropy: float = 0.0) -> Problem:
    """The loop of a byte-level transformer; the metric is the mean loss less `entropy`."""
    model = ByteModel(width=32, layers=1, context=LENGTH)
    optimizer = AdamW(model.parameters(), lr=5e-3)

    def step(batch: Tensor, update: Update) -> None:
        update(model.loss(batch))

    @torch.no_grad()
    def evaluate() -> float:
        return sum(float(model.loss(windows)) for windows in held_out) / len(held_out) - entropy

    return Problem(
        modules={"model": model},
        optimizers={MAIN: optimizer},
        batches=data,
        step=step,
        evaluate=evaluate,
        schedulers={MAIN: warmup_cosine(optimizer, len(data), warmup=20)},
        loss_fn=model.loss,
    )


def _rare_language(seed: int, every: int, steps: int) -> Problem:
    """The second language is other text of the same library, in an alphabet of its own."""
    generator = seeded(seed)
    alphabet = 128 + torch.randperm(128, generator=generator)
    held_out = held_out_windows(1024, LENGTH)

    def second(windows: Tensor) -> Tensor:
        return alphabet[windows % 128]

    data = [text_windows(byte_corpus()[0], LANGUAGE_ROWS, LENGTH, generator) for _ in range(steps)]
    rare = _rare(steps, every, generator)
    data = [second(batch) if odd else batch for batch, odd in zip(data, rare, strict=True)]
    return _language_model(data, [second(held_out)])


def _hard_batches(seed: int) -> Problem:
    """The hard source: other inputs, twice the amplitude, five times the noise."""
    generator, steps = seeded(seed), 1200
    teacher = Teacher(generator, 1.0)
    offset = torch.randn(INPUTS, generator=generator)

    def sample(rows: int, noise: float, hard: bool) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(rows, INPUTS, generator=generator) + offset * hard
        targets = teacher(inputs) * (2.0 if hard else 1.0)
        return inputs, targets + noise * torch.randn(rows, 1, generator=generator)

    rare = _rare(steps, 15, generator)
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=5e-3)
    return supervised(
        model,
        optimizer,
        [sample(256, 1.0 if hard else 0.2, hard) for hard in rare],
        [sample(HELD_OUT, 0.0, hard) for hard in (False, True)],
        F.mse_loss,
        warmup_cosine(optimizer, steps),
    )


def _mixed_sources(seed: int) -> Problem:
    """Python sources, one repeated notice, random hexadecimal digits, random base64."""
    generator, steps = seeded(seed), 800
    notice = b"# Licensed to the PSF under a Contributor Agreement. See LICENSE.\n"

    def drawn(digits: str) -> Tensor:
        letters = torch.tensor(list(digits.encode()), dtype=torch.uint8)
        return letters[torch.randint(len(digits), (100_000,), generator=generator)]

    hexadecimal = drawn("0123456789abcdef")
    base64 = drawn(string.ascii_letters + string.digits + "+/")
    repeated = torch.tensor(list(notice * 100), dtype=torch.uint8)
    texts = [byte_corpus()[0], repeated, hexadecimal, base64]
    data = [
        text_windows(texts[source], LANGUAGE_ROWS, LENGTH, generator)
        for source in torch.randint(4, (steps,), generator=generator).tolist()
    ]
    held_out = [held_out_windows(1024, LENGTH)]
    held_out += [text_windows(text, 1024, LENGTH, generator) for text in texts[1:]]
    entropy = float(torch.tensor([16.0, 64.0]).log().sum()) / 4
    return _language_model(data, held_out, entropy)


def _rare_class_task(every: int, steps: int, quick: bool) -> Task:
    return Task(
        f"rare_class_{every}",
        "healthy",
        "held-out loss, all classes equally",
        lambda seed: _rare_class(seed, every, steps),
        f"An MLP classifier; one of five classes comes only in whole batches, 1 in {every}.",
        quick=quick,
    )


def _rare_language_task(every: int, steps: int, quick: bool) -> Task:
    return Task(
        f"rare_language_{every}",
        "healthy",
        "held-out loss on the second language, nats per byte",
        lambda seed: _rare_language(seed, every, steps),
        f"A byte-level transformer; 1 in {every} batches is in a second alphabet.",
        quick=quick,
    )


TASKS: tuple[Task, ...] = (
    _rare_class_task(12, 1200, quick=True),
    _rare_class_task(60, 1800, quick=True),
    _rare_class_task(300, 3000, quick=False),
    _rare_language_task(20, 800, quick=False),
    _rare_language_task(100, 1200, quick=True),
    _rare_language_task(300, 1800, quick=False),
    Task(
        "hard_batches",
        "healthy",
        "held-out error against noise-free targets, mean of both sources",
        _hard_batches,
        "Regression by an MLP; 1 in 15 batches is from a harder source with five times the noise.",
    ),
    Task(
        "mixed_sources",
        "healthy",
        "held-out loss above the entropy of the random sources, mean of four sources",
        _mixed_sources,
        "A byte-level transformer; each batch is from one of four sources of very different loss.",
    ),
)
