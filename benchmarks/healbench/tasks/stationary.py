"""Healthy runs on data that stay the same: what most training runs are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.models import (
    ByteModel,
    RowBatches,
    byte_corpus,
    epochs,
    held_out_windows,
    mlp,
    plain_loop,
    seeded,
    small_cnn,
    text_windows,
    textured_shapes,
    warmup_cosine,
)

_BATCH = 64


@task("stationary", "held-out loss, nats per byte", quick=True)
def lm_bytes(seed: int) -> Problem:
    """A one-block transformer on the bytes of Python's standard library, AdamW."""
    steps, rows = 700, 16
    generator = seeded(seed)
    model = ByteModel(layers=1, context=32)
    windows = text_windows(byte_corpus()[0], steps * rows, 32, generator)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    return plain_loop(
        model,
        model.loss,
        list(windows.view(steps, rows, -1)),
        optimizer,
        lambda: float(model.loss(held_out_windows(512))),
        warmup_cosine(optimizer, steps, warmup=50),
    )


@task("stationary", "held-out cross entropy", quick=True)
def vision_cnn(seed: int) -> Problem:
    """A CNN with BatchNorm tells ten kinds of noisy shapes apart; SGD with momentum, cosine."""
    steps = 600
    generator = seeded(seed)
    model = small_cnn()
    images, labels = textured_shapes(12000, generator)
    held_out, held_out_labels = textured_shapes(4000, generator)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    return plain_loop(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        RowBatches(epochs(len(images), steps, _BATCH, generator), images, labels),
        optimizer,
        lambda: float(F.cross_entropy(model(held_out), held_out_labels)),
        warmup_cosine(optimizer, steps),
    )


class _Table(nn.Module):
    """Numbers and embedded categories through an MLP.

    Args:
        numbers: numeric columns.
        levels: of each categorical column.
        columns: categorical columns.
        classes: outputs.
    """

    def __init__(self, numbers: int, levels: int, columns: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(levels * columns, 8)
        self.register_buffer("offsets", levels * torch.arange(columns), persistent=False)
        self.mlp = mlp(numbers + 8 * columns, 48, 48, classes, norm=True)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        embedded = self.embedding(categories + self.get_buffer("offsets")).flatten(1)
        return self.mlp(torch.cat([numbers, embedded], 1))


def _table_rows(rows: int, seed: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Eight numbers, three categories of six levels, and one of five classes drawn from them.

    Args:
        rows: how many.
        seed: of the rule that the classes follow.
        generator: of the rows.
    """
    rule = torch.Generator().manual_seed(1000 + seed)
    first = torch.randn(26, 24, generator=rule) / 8**0.5
    second = torch.randn(24, 5, generator=rule)
    numbers = torch.randn(rows, 8, generator=generator)
    categories = torch.randint(6, (rows, 3), generator=generator)
    features = torch.cat([numbers, F.one_hot(categories, 6).flatten(1)], 1)
    scores = torch.tanh(1.5 * features @ first) @ second
    classes = torch.multinomial(scores.softmax(1), 1, generator=generator).squeeze(1)
    return numbers, categories, classes


@task("stationary", "held-out cross entropy")
def tabular_classification(seed: int) -> Problem:
    """Numbers and embedded categories, five classes drawn from their probabilities."""
    steps = 900
    generator = seeded(seed)
    model = _Table(8, 6, 3, 5)
    train = _table_rows(20000, seed, generator)
    numbers, categories, classes = _table_rows(6000, seed, generator)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=1e-2)
    return plain_loop(
        model,
        lambda batch: F.cross_entropy(model(batch[0], batch[1]), batch[2]),
        RowBatches(epochs(20000, steps, _BATCH, generator), *train),
        optimizer,
        lambda: float(F.cross_entropy(model(numbers, categories), classes)),
        warmup_cosine(optimizer, steps),
    )


def _views(images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two views of each image: shifted, with another contrast and with noise of its own."""
    views = []
    for _ in range(2):
        rows, _, height, width = images.shape
        by = torch.randint(-2, 3, (2, rows, 1, 1), generator=generator)
        down = (torch.arange(height)[None, :, None] + by[0]) % height
        right = (torch.arange(width)[None, None, :] + by[1]) % width
        shifted = images[torch.arange(rows)[:, None, None], 0, down, right][:, None]
        contrast = 0.7 + 0.6 * torch.rand(rows, 1, 1, 1, generator=generator)
        noise = 0.2 * torch.randn(images.shape, generator=generator)
        views.append(contrast * shifted + noise)
    return views[0], views[1]


def _info_nce(a: Tensor, b: Tensor, temperature: float = 0.2) -> Tensor:
    """NT-Xent of SimCLR: each view finds its other one among all views of the batch."""
    z = F.normalize(torch.cat([a, b]), dim=1)
    likeness = z @ z.T / temperature
    likeness = likeness.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
    other = torch.arange(len(z)).roll(len(a))
    return F.cross_entropy(likeness, other)


@task("stationary", "held-out InfoNCE")
def contrastive(seed: int) -> Problem:
    """SimCLR: a CNN finds the other view of an image among those of its batch."""
    steps = 500
    generator = seeded(seed)
    model = nn.Sequential(small_cnn(32), nn.ReLU(), nn.Linear(32, 16))
    images, _ = textured_shapes(4000, generator, noise=0.0)
    index = epochs(len(images), steps, _BATCH, generator)
    pairs = [_views(images[rows], generator) for rows in index]
    unseen, _ = textured_shapes(3200, generator, noise=0.0)
    held_out = [_views(rows, generator) for rows in unseen.split(_BATCH)]

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        both = model(torch.cat(batch))
        return _info_nce(*both.chunk(2))

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    return plain_loop(
        model,
        loss,
        pairs,
        optimizer,
        lambda: sum(float(loss(batch)) for batch in held_out) / len(held_out),
        warmup_cosine(optimizer, steps, warmup=30),
    )
