"""Healthy runs whose loop re-initialises, shrinks, prunes or merges weights."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, Task
from benchmarks.healbench.tasks.loops import STEPS, classifier, noise_like, start
from benchmarks.healbench.tasks.mixed_data import ROWS, batches
from benchmarks.healbench.tasks.sick_state import damaged_once

_METRIC = "held-out loss"
RESET = STEPS // 2


def _head_reset(seed: int) -> Problem:
    """As before fine-tuning: the loop's own counter says when."""
    clusters, model = start(seed)
    head: Any = model[4]

    @torch.no_grad()
    def reset(_: Problem) -> None:
        head.weight.zero_()
        head.bias.zero_()

    return damaged_once(classifier(clusters, model), RESET, reset)


def _shrink_perturb(seed: int) -> Problem:
    """Ash and Adams (2020), as each new part of the data comes."""
    clusters, model = start(seed)

    def after(i: int, _: Any) -> None:
        if i % 150 == 149 and i < STEPS - 1:
            for number, weight in enumerate(model.parameters()):
                weight.mul_(0.4).add_(0.02 * noise_like(weight, 100 * i + number))

    return classifier(clusters, model, after=after)


def _gradual_pruning(seed: int) -> Problem:
    """Zhu and Gupta (2017): a cubic schedule to 80 %, and masks that hold."""
    clusters, model = start(seed)
    masks = deepcopy(model).requires_grad_(False)
    matrices = [w for w in model.parameters() if w.ndim == 2]
    kept = [m for m in masks.parameters() if m.ndim == 2]
    for mask in kept:
        nn.init.ones_(mask)

    def after(i: int, _: Any) -> None:
        for weight, mask in zip(matrices, kept, strict=True):
            if 150 <= i <= 450 and i % 50 == 0:
                share = 0.8 * (1 - (1 - (i - 150) / 300) ** 3)
                mask.copy_(weight.abs() > torch.quantile(weight.abs(), share))
            weight.mul_(mask)

    return classifier(clusters, model, after=after, modules={"masks": masks})


def _dormant_units(seed: int) -> Problem:
    """ReDo (Sokar et al. 2023): every 100 steps the least active units begin again."""
    clusters, model = start(seed)
    optimizer = AdamW(model.parameters(), lr=5e-3)
    into, out = (model.get_parameter(f"{layer}.weight") for layer in (2, 4))

    def after(i: int, batch: tuple[Tensor, Tensor]) -> None:
        if i % 100 == 99 and i < STEPS - 1:
            active = model[:4](batch[0]).mean(0)
            units = active.argsort()[:16]
            into[units] = 0.2 * noise_like(into[units], i)
            out[:, units] = 0.0
            for name in ("exp_avg", "exp_avg_sq"):
                optimizer.state[into][name][units] = 0.0
                optimizer.state[out][name][:, units] = 0.0

    return classifier(clusters, model, optimizer, after=after)


class _LowRank(nn.Module):
    """A frozen matrix plus a trained product of rank 4."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(4, frozen.in_features))
        self.up = nn.Parameter(torch.zeros(frozen.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + x @ self.down.T @ self.up.T

    def merge(self, number: int) -> None:
        self.frozen.weight.add_(self.up @ self.down)
        self.up.zero_()
        self.down.copy_(0.1 * noise_like(self.down, number))


def _relora(seed: int) -> Problem:
    """ReLoRA (Lialin et al. 2023): merged every 150 steps, the moments cleared, the rate warmed."""
    clusters, model = start(seed)
    layers = [_LowRank(layer) for layer in list(model)[:3] if isinstance(layer, nn.Linear)]
    model[0], model[2] = layers
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer, cycle = AdamW(trained, lr=2e-2), 150

    def after(i: int, _: Any) -> None:
        if i % cycle == cycle - 1 and i < STEPS - 1:
            for number, layer in enumerate(layers):
                layer.merge(10 * i + number)
                for weight in (layer.up, layer.down):
                    optimizer.state.pop(weight)

    def factor(i: int) -> float:
        return min(1.0, (i % cycle + 1) / 10) * max(0.0, 1 - i / STEPS)

    rate = LambdaLR(optimizer, factor)
    data = batches(clusters.sample(STEPS * ROWS))
    return classifier(clusters, model, optimizer, data=data, after=after, scheduler=rate)


TASKS: tuple[Task, ...] = tuple(
    Task(name, "healthy", _METRIC, build, about, quick=name == "head_reset")
    for name, build, about in (
        ("head_reset", _head_reset, "An MLP classifier whose last layer is zeroed at half time."),
        ("shrink_perturb", _shrink_perturb, "The same; weights times 0.4 and noise, three times."),
        ("gradual_pruning", _gradual_pruning, "The same; magnitude pruning in steps to 80 %."),
        ("dormant_units", _dormant_units, "The same; the least active units are re-initialised."),
        ("relora", _relora, "The same with low-rank parts that are merged every 150 steps."),
    )
)
