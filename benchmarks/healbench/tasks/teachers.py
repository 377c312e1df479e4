"""Healthy runs whose loss depends on a teacher, an average or a queue that the loop keeps."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, classifier, noise_like, program, start
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, ROWS, Clusters, batches
from benchmarks.healbench.tasks.models import mlp, seeded

_WIDTH = 8
_TAUGHT = 150


def _average(slow: nn.Module, fast: nn.Module, rate: float) -> None:
    for mean, weight in zip(slow.parameters(), fast.parameters(), strict=True):
        mean.lerp_(weight, rate)


@task("teachers and queues", "held-out loss")
def mean_teacher(seed: int) -> Problem:
    """A classifier with few labels that follows the average of its own weights."""
    # Tarvainen and Valpola (2017): 8 of 64 rows have labels; consistency from step 150 on.
    clusters, model = start(seed)
    teacher = deepcopy(model).requires_grad_(False)
    data = [
        (x, x + 0.3 * noise_like(x, i), y, i >= _TAUGHT)
        for i, (x, y) in enumerate(batches(clusters.sample(STEPS * ROWS)))
    ]

    def loss_fn(batch: tuple[Tensor, Tensor, Tensor, bool]) -> Tensor:
        x, noisy, y, taught = batch
        scores = model(noisy)
        loss = F.cross_entropy(scores[:8], y[:8])
        if taught:
            loss = loss + 5 * F.mse_loss(scores.softmax(1), teacher(x).softmax(1))
        return loss

    def after(i: int, _: Any) -> None:
        _average(teacher, model, 0.02)

    modules = {"teacher": teacher}
    return classifier(clusters, model, data=data, loss_fn=loss_fn, after=after, modules=modules)


class _Queue(nn.Module):
    """The last keys, oldest first."""

    keys: Tensor

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        keys = torch.randn(8 * ROWS, _WIDTH, generator=generator)
        self.register_buffer("keys", F.normalize(keys, dim=1))


@task("teachers and queues", "held-out contrastive loss", quick=True)
def queue_of_keys(seed: int) -> Problem:
    """Contrastive learning against a queue of keys of a slow encoder."""
    # MoCo (He et al. 2020) on two noisy views of each row.
    generator = seeded(seed)
    clusters = Clusters(CLASSES, generator, 1.5)
    model = mlp(INPUTS, 64, _WIDTH)
    slow, queue = deepcopy(model).requires_grad_(False), _Queue(generator)
    held_out = clusters.sample(HELD_OUT)[0]
    data = [x + 0.3 * noise_like(x.expand(2, *x.shape), i) for i, (x, _) in enumerate(
        batches(clusters.sample(STEPS * ROWS)))]  # fmt: skip

    def likeness(views: Tensor, negatives: Tensor) -> Tensor:
        query, key = F.normalize(model(views[0]), dim=1), F.normalize(slow(views[1]), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ negatives.T], 1) / 0.2
        return F.cross_entropy(scores, torch.zeros(len(query), dtype=torch.long))

    def after(i: int, views: Tensor) -> None:
        _average(slow, model, 0.01)
        keys = F.normalize(slow(views[1]), dim=1)
        queue.keys.copy_(torch.cat([queue.keys[len(keys) :], keys]))

    def evaluate() -> float:
        views = held_out + 0.3 * noise_like(held_out.expand(2, *held_out.shape), 0)
        z, other = (F.normalize(model(view[:512]), dim=1) for view in views)
        return float(F.cross_entropy(z @ other.T / 0.2, torch.arange(512)))

    return program(
        model,
        AdamW(model.parameters(), lr=3e-3),
        data,
        lambda views: likeness(views, queue.keys),
        evaluate,
        after=after,
        modules={"slow": slow, "queue": queue},
    )


@task("teachers and queues", "held-out loss")
def born_again(seed: int) -> Problem:
    """A classifier that begins again every 200 steps, with its last self as a teacher."""
    # Furlanello et al. (2018): every 200 steps a new student learns from the last one too.
    clusters, model = start(seed)
    teacher, fresh = (deepcopy(model).requires_grad_(False) for _ in range(2))
    optimizer = AdamW(model.parameters(), lr=5e-3)
    data = [(x, y, i >= 200) for i, (x, y) in enumerate(batches(clusters.sample(STEPS * ROWS)))]

    def before(i: int, _: Any) -> None:
        if i and i % 200 == 0:
            teacher.load_state_dict(model.state_dict())
            model.load_state_dict(fresh.state_dict())
            optimizer.state.clear()

    def loss_fn(batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        x, y, taught = batch
        scores = model(x)
        loss = F.cross_entropy(scores, y)
        return loss + F.cross_entropy(scores, teacher(x).softmax(1)) if taught else loss

    modules = {"teacher": teacher}
    options: dict[str, Any] = {"data": data, "before": before, "modules": modules}
    return classifier(clusters, model, optimizer, loss_fn=loss_fn, **options)
