"""Healthy runs with dropout, with over-fitting, and without any noise of the batches."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Adam, AdamW

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, Clusters, Teacher, seeded
from benchmarks.healbench.tasks.models import RowBatches, epochs, mlp, plain_loop, warmup_cosine


def _classifier(seed: int, rows: int, dropout: float, wrong: float, steps: int) -> Problem:
    """A training set that is seen again and again, with a share of wrong labels."""
    generator = seeded(seed)
    clusters = Clusters(8, generator, 1.5)
    x, y = clusters.sample(rows)
    other = torch.randint(8, y.shape, generator=generator)
    y = torch.where(torch.rand(rows, generator=generator) < wrong, other, y)
    held_out, labels = clusters.sample(HELD_OUT)
    layers = list(mlp(INPUTS, 128, 128, 8))
    model = nn.Sequential(*layers[:4], nn.Dropout(dropout), *layers[4:])
    optimizer = AdamW(model.parameters(), lr=3e-3)
    return plain_loop(
        model,
        lambda batch: F.cross_entropy(model(batch[0]), batch[1]),
        RowBatches(epochs(rows, steps, 64, generator), x, y),
        optimizer,
        lambda: float(F.cross_entropy(model(held_out), labels)),
        warmup_cosine(optimizer, steps),
    )


def _full_batch(seed: int) -> Problem:
    """The same 256 rows at every step; late steps of Adam are tiny and its norms uneven."""
    generator, steps = seeded(seed), 800
    x, y = Teacher(generator, 0.7).sample(256)
    model = mlp(INPUTS, 64, 64, 1, activation=nn.Tanh)
    optimizer = Adam(model.parameters(), lr=1e-2)
    return plain_loop(
        model,
        lambda batch: F.mse_loss(model(batch[0]), batch[1]),
        [(x, y)] * steps,
        optimizer,
        lambda: max(0.02, float(F.mse_loss(model(x), y).sqrt())),
    )


TASKS: tuple[Task, ...] = (
    Task(
        "dropout",
        "healthy",
        "held-out loss",
        partial(_classifier, rows=4096, dropout=0.5, wrong=0.0, steps=800),
        "An MLP classifier with dropout of one half, AdamW.",
    ),
    Task(
        "over_fitting",
        "healthy",
        "held-out loss",
        partial(_classifier, rows=512, dropout=0.0, wrong=0.1, steps=800),
        "An MLP classifier learns 512 rows by heart, a tenth of them with wrong labels: the "
        "training loss goes to 0.",
    ),
    Task(
        "full_batch",
        "healthy",
        "error on the training data, or 0.02 if smaller",
        _full_batch,
        "Regression by an MLP on all of its 256 rows at every step, Adam at a constant rate.",
    ),
)
