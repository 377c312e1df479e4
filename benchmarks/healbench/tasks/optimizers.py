"""Healthy runs of one classifier under many optimizers, each at a rate that suits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Muon, Optimizer

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    batches,
    supervised,
)
from benchmarks.healbench.tasks.models import seeded, warmup_cosine

_STEPS = 500
_CLASSES = 10


class Lion(Optimizer):
    """Sign of an interpolation of gradient and momentum (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Iterable[Tensor], lr: float, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter with a gradient."""
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                momentum = state["exp_avg"]
                direction = momentum.lerp(weight.grad, 1 - first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(direction, alpha=group["lr"])
                momentum.lerp_(weight.grad, 1 - second)


class ScheduleFreeSGD(Optimizer):
    """Schedule-free SGD (Defazio et al. 2024): the parameters are y, the state has z and x."""

    def __init__(self, params: Iterable[Tensor], lr: float, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter with a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update(z=weight.clone(), x=weight.clone(), step=torch.zeros(()))
                state["step"] += 1
                state["z"].sub_(weight.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / float(state["step"]))
                weight.copy_(state["z"].lerp(state["x"], group["beta"]))


class _MatrixModel(nn.Module):
    """An MLP without biases: Muon takes matrices only."""

    def __init__(self) -> None:
        super().__init__()
        pairs = pairwise((INPUTS, 64, 64, _CLASSES))
        self.layers = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if number else x)
        return x


def _classifier(seed: int, optimizer: Callable[..., Optimizer], schedule: bool = True) -> Problem:
    clusters = Clusters(_CLASSES, seeded(seed), 1.2)
    model = _MatrixModel()
    inner = optimizer(model.parameters())
    data, held_out = batches(clusters.sample(_STEPS * ROWS)), clusters.sample(HELD_OUT)
    scheduler = warmup_cosine(inner, _STEPS) if schedule else None
    problem = supervised(model, inner, data, [held_out], scheduler=scheduler)
    if isinstance(inner, ScheduleFreeSGD):
        evaluate = problem.evaluate

        def at_average() -> float:
            for weight in model.parameters():
                weight.data.copy_(inner.state[weight]["x"])
            return evaluate()

        problem.evaluate = at_average
    return problem


def _task(name: str, title: str, build: Callable[..., Optimizer], schedule: bool = True) -> None:
    about = f"An MLP classifier without biases, {title}."
    register = task("optimizers", "held-out loss", name=f"optimizer_{name}", about=about)
    register(partial(_classifier, optimizer=build, schedule=schedule))


_task("sgd", "plain SGD", partial(SGD, lr=0.3))
_task("lion", "Lion", partial(Lion, lr=1e-3))
_task("muon", "Muon", partial(Muon, lr=2e-2))
_task("adafactor", "Adafactor", partial(Adafactor, lr=3e-2))
_task("schedule_free", "schedule-free SGD", partial(ScheduleFreeSGD, lr=1.0), schedule=False)
