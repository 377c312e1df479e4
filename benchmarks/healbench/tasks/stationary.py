"""Healthy runs on data that stay the same: what most training runs are."""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.models import (
    ByteModel,
    RowBatches,
    byte_corpus,
    epochs,
    friedman,
    held_out_windows,
    mlp,
    plain_loop,
    small_cnn,
    text_windows,
    textured_shapes,
    warmup_cosine,
)

_BATCH = 64


def _lm_bytes(seed: int) -> Problem:
    steps, rows = 700, 16
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
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


def _vision_cnn(seed: int) -> Problem:
    steps = 600
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
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


def _tabular_regression(seed: int) -> Problem:
    steps = 1000
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 1)
    x, clean = friedman(4000, generator)
    y = clean + 0.2 * torch.randn(clean.shape, generator=generator)
    held_out, target = friedman(8000, generator)
    target = target + 0.2 * torch.randn(target.shape, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), 6e-3)
    return plain_loop(
        model,
        lambda batch: F.mse_loss(model(batch[0]).squeeze(1), batch[1]),
        RowBatches(epochs(len(x), steps, _BATCH, generator), x, y),
        optimizer,
        lambda: float(F.mse_loss(model(held_out).squeeze(1), target).sqrt()),
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


def _tabular_classification(seed: int) -> Problem:
    steps = 900
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
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


def _contrastive(seed: int) -> Problem:
    steps = 500
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
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


@cache
def _teacher(seed: int) -> nn.Module:
    """A CNN trained on other images than its student's; do not train it further."""
    generator = torch.Generator().manual_seed(2000 + seed)
    torch.manual_seed(2000 + seed)
    model = small_cnn(width=12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = warmup_cosine(optimizer, 250)
    for _ in range(250):
        images, labels = textured_shapes(_BATCH, generator)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def _distillation(seed: int) -> Problem:
    steps, temperature = 800, 2.0
    teacher = _teacher(seed)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), mlp(256, 64, 10))
    images, _ = textured_shapes(12000, generator)
    held_out, _ = textured_shapes(4000, generator)
    with torch.no_grad():
        scores, held_out_scores = teacher(images), teacher(held_out)

    def loss(batch: tuple[Tensor, ...]) -> Tensor:
        student = (model(batch[0]) / temperature).log_softmax(1)
        wanted = (batch[1] / temperature).log_softmax(1)
        kl = F.kl_div(student, wanted, reduction="batchmean", log_target=True)
        return temperature**2 * kl

    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    return plain_loop(
        model,
        loss,
        RowBatches(epochs(len(images), steps, _BATCH, generator), images, scores),
        optimizer,
        lambda: float(loss((held_out, held_out_scores))),
        warmup_cosine(optimizer, steps),
    )


@cache
def _pretrained(seed: int) -> dict[str, Tensor]:
    """Weights of a byte model after 300 steps on Python's sources; copy before training them."""
    generator = torch.Generator().manual_seed(3000 + seed)
    torch.manual_seed(3000 + seed)
    model = ByteModel(layers=1, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95))
    schedule = warmup_cosine(optimizer, 300, warmup=30)
    for _ in range(300):
        optimizer.zero_grad()
        model.loss(text_windows(byte_corpus()[0], 16, 32, generator)).backward()
        optimizer.step()
        schedule.step()
    return model.state_dict()


@cache
def _prose() -> tuple[Tensor, Tensor]:
    """The language reference that `help()` shows, as (training, held-out) bytes."""
    text = (Path(sysconfig.get_path("stdlib")) / "pydoc_data" / "topics.py").read_bytes()
    cut = len(text) * 9 // 10
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:cut], data[cut:]


def _finetune_pretrained(seed: int) -> Problem:
    steps, rows = 500, 16
    weights = _pretrained(seed)
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = ByteModel(layers=1, context=32)
    model.load_state_dict(weights)
    seen, unseen = _prose()
    windows = text_windows(seen, steps * rows, 32, generator)
    fixed = torch.Generator().manual_seed(0)
    held_out = text_windows(unseen, 512, 32, fixed)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.01)
    return plain_loop(
        model,
        model.loss,
        list(windows.view(steps, rows, -1)),
        optimizer,
        lambda: float(model.loss(held_out)),
        warmup_cosine(optimizer, steps, warmup=25),
    )


TASKS: tuple[Task, ...] = (
    Task(
        "lm_bytes",
        "healthy",
        "held-out loss, nats per byte",
        _lm_bytes,
        "A one-block transformer with LayerNorm on the bytes of Python's standard library, AdamW "
        "with warm-up and cosine.",
        quick=True,
    ),
    Task(
        "vision_cnn",
        "healthy",
        "held-out cross entropy",
        _vision_cnn,
        "A CNN with BatchNorm tells ten kinds of noisy shapes apart; SGD with momentum, cosine.",
        quick=True,
    ),
    Task(
        "tabular_regression",
        "healthy",
        "held-out RMSE",
        _tabular_regression,
        "An MLP on Friedman's regression problem with Gaussian noise, Adam with cosine.",
        quick=True,
    ),
    Task(
        "tabular_classification",
        "healthy",
        "held-out cross entropy",
        _tabular_classification,
        "Numbers and embedded categories, five classes drawn at random from their probabilities, "
        "AdamW.",
    ),
    Task(
        "contrastive",
        "healthy",
        "held-out InfoNCE",
        _contrastive,
        "SimCLR: a CNN finds the other view of an image among those of its batch.",
    ),
    Task(
        "distillation",
        "healthy",
        "held-out KL divergence from the teacher",
        _distillation,
        "An MLP learns the softened outputs of a fixed CNN.",
    ),
    Task(
        "finetune_pretrained",
        "healthy",
        "held-out loss, nats per byte",
        _finetune_pretrained,
        "A byte model pretrained on Python's sources goes on with Python's manual, at half "
        "the learning rate.",
    ),
)
