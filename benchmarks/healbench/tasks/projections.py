"""Healthy runs with penalties and projections that the `loss_fn` does not contain."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import CLASSES, STEPS, Value, classifier, start
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, ROWS, Clusters, batches

_METRIC = "held-out loss"
_CHANGE = STEPS // 2


def _max_norm(seed: int) -> Problem:
    """Srivastava et al. (2014): the norm of the weights into a unit is at most 1."""
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.renorm_(2, 0, 1.0)

    return classifier(clusters, model, SGD(model.parameters(), lr=0.1, momentum=0.9), after=after)


def _clipped_weights(seed: int) -> Problem:
    """Each weight is at most 0.15 from half time on, as for a device with few bits."""
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i >= _CHANGE:
            for weight in model.parameters():
                weight.clamp_(-0.15, 0.15)

    return classifier(clusters, model, after=after)


def _orthogonal(seed: int) -> Problem:
    clusters, model = start(seed)
    hidden = model.get_parameter("2.weight")

    def term(_: Any) -> Tensor:
        return 0.1 * (hidden @ hidden.T - torch.eye(64)).square().sum()

    return classifier(clusters, model, term=term)


def _consolidation(seed: int) -> Problem:
    """EWC (Kirkpatrick et al. 2017): a second task, and a penalty on leaving the first."""
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


def _multiplier(seed: int) -> Problem:
    """A constraint by dual ascent: class 0 is predicted with a mean probability of at most 0.05."""
    clusters, model = start(seed)
    multiplier = Value()
    inputs, labels = clusters.sample(HELD_OUT)

    def excess(inputs: Tensor) -> Tensor:
        return model(inputs).softmax(1)[:, 0].mean() - 0.05

    def term(batch: tuple[Tensor, Tensor]) -> Tensor:
        return multiplier.value * excess(batch[0])

    def after(i: int, batch: tuple[Tensor, Tensor]) -> None:
        multiplier.value = max(0.0, multiplier.value + 0.2 * float(excess(batch[0])))

    problem = classifier(clusters, model, term=term, after=after, state={"multiplier": multiplier})

    @torch.no_grad()
    def evaluate() -> float:
        return float(F.cross_entropy(model(inputs), labels) + 10 * excess(inputs).clamp(min=0))

    problem.evaluate = evaluate
    return problem


TASKS: tuple[Task, ...] = (
    Task(
        "max_norm",
        "healthy",
        _METRIC,
        _max_norm,
        "An MLP classifier, SGD with momentum; each step ends with a projection of the weights "
        "into each unit to a norm of at most 1.",
    ),
    Task(
        "clipped_weights",
        "healthy",
        _METRIC,
        _clipped_weights,
        "The same, AdamW; from half time on each weight is clipped to 0.15 after each step.",
        quick=True,
    ),
    Task(
        "orthogonal",
        "healthy",
        _METRIC,
        _orthogonal,
        "The same; a large penalty on the hidden layer, outside of the `loss_fn`.",
    ),
    Task(
        "consolidation",
        "healthy",
        "sum of the held-out losses of both tasks",
        _consolidation,
        "The same; another task from half time on, and a penalty on leaving the first (EWC).",
    ),
    Task(
        "multiplier",
        "healthy",
        "held-out loss plus ten times the violation",
        _multiplier,
        "The same with a constraint whose multiplier the loop adapts.",
    ),
)
