"""Healthy runs whose loss function changes on the way: the same batch has another loss then."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import Value, program
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Batch,
    Clusters,
    Teacher,
    batches,
)
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

_CHANGE = 300


def _program(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Any],
    objective: Value,
    at_step: Callable[[int], float],
    loss_fn: Callable[[Any], Tensor],
    evaluate: Callable[[], float],
    floor: float = 0.0,
) -> Problem:
    """The loop that sets the objective to `at_step` of the batch's number, then updates."""

    def before(i: int, _: Any) -> None:
        objective.value = at_step(i)

    return program(
        model,
        optimizer,
        data,
        loss_fn,
        evaluate,
        before=before,
        scheduler=warmup_cosine(optimizer, len(data), floor=floor),
        state={"objective": objective},
    )


@task("changing objective", "held-out loss plus error of the second head", quick=True)
def second_term_ramp(seed: int) -> Problem:
    """An MLP classifier; from step 300 on a much larger term of the loss is phased in."""
    # A second head with targets that are not standardised; its weight goes from 0 to 1.
    generator, steps, classes = seeded(seed), 1200, 8
    clusters, teacher = Clusters(classes, generator, 1.5), Teacher(generator, 0.7)
    inputs, labels = clusters.sample(steps * ROWS)
    data = batches((inputs, torch.cat([labels[:, None], 12 + 6 * teacher(inputs)], dim=1)))
    held_out, held_out_labels = clusters.sample(HELD_OUT)
    model = mlp(INPUTS, 64, 64, classes + 1)
    optimizer = Adam(model.parameters(), lr=3e-3)
    weight = Value()

    def parts(x: Tensor, labels: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        out = model(x)
        return F.cross_entropy(out[:, :-1], labels), F.mse_loss(out[:, -1], values)

    def loss_fn(batch: Batch) -> Tensor:
        first, second = parts(batch[0], batch[1][:, 0].long(), batch[1][:, 1])
        return first + weight.value * second

    def evaluate() -> float:
        first, second = parts(held_out, held_out_labels, 12 + 6 * teacher(held_out)[:, 0])
        return float(first + second.sqrt())

    def at_step(i: int) -> float:
        return min(1.0, max(0, i - _CHANGE) / 30)

    return _program(model, optimizer, data, weight, at_step, loss_fn, evaluate)


@task("changing objective", "root mean square error")
def physics_informed(seed: int) -> Problem:
    """A net fitted to twelve points, then its differential equation is phased in."""
    # Twelve noisy points of u first, then u'' + u^2 = f on [-1, 1] is phased in.
    generator, steps = seeded(seed), 1200
    model = mlp(1, 32, 32, 1, activation=nn.Tanh)
    optimizer = Adam(model.parameters(), lr=4e-3)
    weight = Value()

    def solution(x: Tensor) -> Tensor:
        return torch.sin(6 * x) + 0.3 * torch.cos(9 * x)

    def force(x: Tensor) -> Tensor:
        return -36 * torch.sin(6 * x) - 24.3 * torch.cos(9 * x) + solution(x) ** 2

    points = torch.linspace(-1, 1, 12)[:, None]
    values = solution(points) + 0.03 * torch.randn(12, 1, generator=generator)
    data = list(torch.rand(steps, 32, 1, generator=generator) * 2 - 1)
    grid = torch.linspace(-1, 1, 400)[:, None]

    def loss_fn(places: Tensor) -> Tensor:
        fit = F.mse_loss(model(points), values)
        if not weight.value:
            return fit
        with torch.enable_grad():
            x = places.clone().requires_grad_()
            u = model(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            return fit + weight.value * (bend + u**2 - force(places)).square().mean() / 10

    def at_step(i: int) -> float:
        return min(1.0, max(0, i - _CHANGE) / 30)

    def evaluate() -> float:
        return math.sqrt(F.mse_loss(model(grid), solution(grid)))

    return _program(model, optimizer, data, weight, at_step, loss_fn, evaluate, floor=0.02)


@task("horizon and curriculum", "held-out loss of 8 steps")
def growing_rollout(seed: int) -> Problem:
    """A model of the Lorenz system, AdamW, whose roll-out grows from 1 to 24 steps."""
    # The roll-out is one step longer every 8 updates.
    generator, steps, longest = seeded(seed), 500, 24
    model = mlp(3, 48, 3, activation=nn.Tanh)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    length = Value()

    def simulated(rows: int) -> Tensor:
        """Positions (rows, longest + 1, 3), a tenth of the usual scale, centred."""
        x, path = 0.8 * torch.randn(rows, 3, generator=generator), []
        for _ in range(longest + 1):
            path.append(x)
            for _ in range(5):
                a, b, c = (10 * x).unbind(1)
                change = [10 * (b - a), a * (3 - c) - b, a * b - 8 / 3 * (c + 25)]
                x = x + 0.001 * torch.stack(change, dim=1)
        return torch.stack(path, dim=1)

    def rolled_out(path: Tensor, steps: int) -> Tensor:
        x, loss = path[:, 0], torch.zeros(())
        for k in range(1, steps + 1):
            x = x + model(x)
            loss = loss + (x - path[:, k]).square().sum(1).mean()
        return loss

    data = [simulated(16) for _ in range(steps)]
    held_out = simulated(300)

    def loss_fn(path: Tensor) -> Tensor:
        return rolled_out(path, int(length.value))

    def at_step(i: int) -> float:
        return min(longest, 1 + max(0, i - 150) // 8)

    def evaluate() -> float:
        return float(rolled_out(held_out, 8)) / 8

    return _program(model, optimizer, data, length, at_step, loss_fn, evaluate, floor=0.02)
