"""Healthy runs whose data change on the way, at once or in turns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from benchmarks.healbench.problem import MAIN, Problem, Update, task
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Batch,
    Clusters,
    Teacher,
    batches,
    supervised,
)
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


class _Online:
    """Loss of each batch before its update: every batch is new, so this is a held-out loss."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def state_dict(self) -> dict[str, dict[int, float]]:
        return {"losses": dict(self.losses)}

    def load_state_dict(self, state: dict[str, dict[int, float]]) -> None:
        self.losses = dict(state["losses"])


@task("changing data", "mean loss on new batches in the last 100 steps of each task", quick=True)
def task_every_300(seed: int) -> Problem:
    """An MLP, Adam at a constant rate; every 300 steps a new target function, unannounced."""
    generator, length, tasks = seeded(seed), 300, 4
    model = mlp(INPUTS, 64, 64, 1)
    pairs = [
        pair
        for _ in range(tasks)
        for pair in batches(Teacher(generator, 1.0).sample(length * ROWS, noise=0.2))
    ]
    data = [(i, *pair) for i, pair in enumerate(pairs)]
    online = _Online()

    def loss_fn(batch: tuple[int, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[1]), batch[2])

    def step(batch: tuple[int, Tensor, Tensor], update: Update) -> None:
        loss = loss_fn(batch)
        online.losses[batch[0]] = loss.item()
        update(loss)

    @torch.no_grad()
    def evaluate() -> float:
        """Tasks that a stopped run never reached are judged with the weights it ended on."""
        means = []
        for end in range(length, tasks * length + 1, length):
            last = range(end - 100, end)
            seen = [online.losses[i] for i in last if i in online.losses]
            seen = seen or [float(loss_fn(data[i])) for i in last]
            means.append(sum(seen) / len(seen))
        return sum(means) / tasks

    return Problem(
        modules={"model": model},
        optimizers={MAIN: Adam(model.parameters(), lr=3e-3)},
        batches=data,
        step=step,
        evaluate=evaluate,
        state={"online": online},
        loss_fn=loss_fn,
    )


@task("changing data", "held-out loss on the new domain", quick=True)
def domain_change(seed: int) -> Problem:
    """Fine-tuning of a pre-trained MLP classifier; the domain changes for good at step 500."""
    generator, steps = seeded(seed), 1000
    model = mlp(INPUTS, 64, 64, 10)
    before = Clusters(10, generator, 1.2)
    first, second = Clusters(10, generator), Clusters(10, generator, 1.2)
    first.centres = before.centres + 0.5 * first.centres
    pretraining = Adam(model.parameters(), lr=3e-3)
    for inputs, labels in batches(before.sample(300 * ROWS)):
        pretraining.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        pretraining.step()
    optimizer = AdamW(model.parameters(), lr=5e-3)
    return supervised(
        model,
        optimizer,
        batches(first.sample(500 * ROWS)) + batches(second.sample(500 * ROWS)),
        [second.sample(HELD_OUT)],
        scheduler=warmup_cosine(optimizer, steps, warmup=50),
    )


@task("horizon and curriculum", "held-out loss on the last stage", quick=True)
def curriculum(seed: int) -> Problem:
    """Regression by an MLP; every 300 steps the targets gain a larger and rougher part."""
    generator, steps = seeded(seed), 1200
    model = mlp(INPUTS, 96, 96, 1)
    parts = [Teacher(generator, frequency) for frequency in (0.4, 0.6, 0.8, 1.0)]

    def stage(level: int, rows: int) -> Batch:
        inputs = torch.randn(rows, INPUTS, generator=generator)
        return inputs, sum((parts[i](inputs) * (1.0 + i) for i in range(level + 1)), torch.zeros(1))

    optimizer = Adam(model.parameters(), lr=8e-3)
    return supervised(
        model,
        optimizer,
        [pair for level in range(4) for pair in batches(stage(level, 300 * ROWS))],
        [stage(3, HELD_OUT)],
        F.mse_loss,
        warmup_cosine(optimizer, steps),
    )


@task("changing data", "held-out loss, all classes", quick=True)
def sorted_stream(seed: int) -> Problem:
    """An MLP classifier, SGD, data sorted by class: 20 to 40 batches of one class in turn."""
    generator, classes, steps = seeded(seed), 5, 1200
    clusters = Clusters(classes, generator, 1.3)
    labels: list[int] = []
    while len(labels) < steps:
        length = int(torch.randint(20, 41, (), generator=generator))
        labels += [(labels[-1] + 1) % classes if labels else 0] * length
    of_rows = torch.tensor(labels[:steps]).repeat_interleave(ROWS)
    model = mlp(INPUTS, 64, 64, classes)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    return supervised(
        model,
        optimizer,
        batches((clusters.inputs(of_rows), of_rows)),
        [clusters.sample(HELD_OUT)],
        scheduler=warmup_cosine(optimizer, steps),
    )


@task("changing data", "held-out loss, mean of both domains")
def two_domains_alternating(seed: int) -> Problem:
    """An MLP classifier, 100 steps on one domain and 100 on another, in turn."""
    generator, steps = seeded(seed), 1200
    domains = [Clusters(10, generator) for _ in range(2)]
    model = mlp(INPUTS, 64, 64, 10)
    optimizer = AdamW(model.parameters(), lr=8e-3)
    return supervised(
        model,
        optimizer,
        [pair for i in range(12) for pair in batches(domains[i % 2].sample(100 * ROWS))],
        [domain.sample(HELD_OUT) for domain in domains],
        scheduler=warmup_cosine(optimizer, steps),
    )


@task("horizon and curriculum", "held-out loss, nats per byte")
def sequence_growth(seed: int) -> Problem:
    """A byte-level transformer; windows of 8, 16, 32, then 64 bytes, 150 steps each."""
    generator, text, tokens = seeded(seed), byte_corpus()[0], 512
    model = ByteModel(width=32, layers=1, context=64)
    data = [
        text_windows(text, tokens // length, length, generator)
        for length in (8, 16, 32, 64)
        for _ in range(150)
    ]
    optimizer = AdamW(model.parameters(), lr=5e-3)

    return plain_loop(
        model,
        model.loss,
        data,
        optimizer,
        lambda: float(model.loss(held_out_windows(256, 64))),
        warmup_cosine(optimizer, len(data), warmup=20),
    )


@task("changing data", "held-out loss against noise-free targets")
def harder_noise(seed: int) -> Problem:
    """Regression by an MLP; at step 400 target noise grows from 0.3 to 1.0 for good."""
    generator, steps = seeded(seed), 1200
    teacher = Teacher(generator, 1.5)
    model = mlp(INPUTS, 64, 64, 1)
    optimizer = Adam(model.parameters(), lr=8e-3)
    return supervised(
        model,
        optimizer,
        batches(teacher.sample(400 * 256, 0.3), 256) + batches(teacher.sample(800 * 256, 1.0), 256),
        [teacher.sample(HELD_OUT)],
        F.mse_loss,
        warmup_cosine(optimizer, steps),
    )
