"""Healthy runs with penalties, terms and projections that the `loss_fn` does not contain."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, AdamW

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, classifier, program, start
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, ROWS, Clusters, Teacher, batches
from benchmarks.healbench.tasks.models import mlp, seeded

_METRIC = "held-out loss"
_CHANGE = STEPS // 2


@task("penalties and projections", _METRIC)
def max_norm(seed: int) -> Problem:
    """An MLP classifier, SGD; after each step the weights into a unit have a norm of 1 at most."""
    # Srivastava et al. (2014).
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.renorm_(2, 0, 1.0)

    return classifier(clusters, model, SGD(model.parameters(), lr=0.1, momentum=0.9), after=after)


@task("penalties and projections", _METRIC, quick=True)
def clipped_weights(seed: int) -> Problem:
    """The same, AdamW; from half time on each weight is clipped to 0.15 after each step."""
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i >= _CHANGE:
            for weight in model.parameters():
                weight.clamp_(-0.15, 0.15)

    return classifier(clusters, model, after=after)


@task("penalties and projections", _METRIC)
def orthogonal(seed: int) -> Problem:
    """The same; a large penalty on the hidden layer, outside of the `loss_fn`."""
    clusters, model = start(seed)
    hidden = model.get_parameter("2.weight")

    def term(_: Any) -> Tensor:
        return 0.1 * (hidden @ hidden.T - torch.eye(64)).square().sum()

    return classifier(clusters, model, term=term)


@task("penalties and projections", "sum of the held-out losses of both tasks")
def consolidation(seed: int) -> Problem:
    """The same; another task from half time on, and a penalty on leaving the first (EWC)."""
    # Kirkpatrick et al. (2017).
    clusters, model = start(seed)
    second = Clusters(CLASSES, clusters.generator, 1.5)
    data = [*batches(clusters.sample(_CHANGE * ROWS)), *batches(second.sample(_CHANGE * ROWS))]
    held_out = clusters.sample(HELD_OUT), second.sample(HELD_OUT)
    anchor, fisher = (deepcopy(model).requires_grad_(False) for _ in range(2))
    for weight in fisher.parameters():
        torch.nn.init.zeros_(weight)

    def before(i: int, _: Any) -> None:
        if i == _CHANGE:
            anchor.load_state_dict(model.state_dict())
            for x, y in data[i - 20 : i]:
                loss = F.cross_entropy(model(x), y)
                grads = torch.autograd.grad(loss, list(model.parameters()))
                for weight, grad in zip(fisher.parameters(), grads, strict=True):
                    weight.add_(ROWS / 20 * grad.square())

    def term(_: Any) -> Tensor:
        parts = zip(fisher.parameters(), model.parameters(), anchor.parameters(), strict=True)
        return 20 * torch.stack([(f * (w - a).square()).sum() for f, w, a in parts]).sum()

    modules = {"anchor": anchor, "fisher": fisher}
    problem = classifier(clusters, model, data=data, before=before, term=term, modules=modules)
    problem.evaluate = lambda: sum(float(F.cross_entropy(model(x), y)) for x, y in held_out)
    return problem


# -- terms after `healer.loss(batch)` has observed the loss ----------------------------------------


@task("terms after the loss", "held-out loss of the classes", quick=True)
def auxiliary_head(seed: int) -> Problem:
    """An MLP classifier; from half time on the loop adds the large loss of a second head."""
    generator = seeded(seed)
    clusters, teacher = Clusters(CLASSES, generator, 1.5), Teacher(generator, 0.7)
    model = mlp(INPUTS, 64, 64, CLASSES + 1)
    inputs, labels = clusters.sample(STEPS * ROWS)
    values = 12 + 6 * teacher(inputs)[:, 0]
    weight = (torch.arange(STEPS * ROWS) >= _CHANGE * ROWS).float()
    data = [
        *zip(*(each.split(ROWS) for each in (inputs, labels, values, weight)), strict=True)
    ]  # fmt: skip
    held_out, held_out_labels = clusters.sample(HELD_OUT)

    def term(batch: tuple[Tensor, ...]) -> Tensor:
        x, _, value, weight = batch
        return (weight * (model(x)[:, -1] - value).square()).mean()

    return program(
        model,
        AdamW(model.parameters(), lr=5e-3),
        data,
        lambda batch: F.cross_entropy(model(batch[0])[:, :-1], batch[1]),
        lambda: float(F.cross_entropy(model(held_out)[:, :-1], held_out_labels)),
        term=term,
    )
