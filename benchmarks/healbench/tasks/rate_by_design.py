"""Healthy runs whose rate or horizon is raised by the user: the loss rises and comes back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import MAIN, Problem, Task, Update
from benchmarks.healbench.tasks.mixed_data import (
    HELD_OUT,
    INPUTS,
    ROWS,
    Clusters,
    batches,
    seeded,
    supervised,
)
from benchmarks.healbench.tasks.models import mlp, warmup_cosine


def _raised_rate(seed: int) -> Problem:
    steps = 900
    clusters = Clusters(8, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, 8)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)

    def factor(step: int) -> float:
        if step < steps // 3:
            return 1.0
        return 10.0 * (1 - (step - steps // 3) / (steps - steps // 3))

    data, held_out = batches(clusters.sample(steps * ROWS)), [clusters.sample(HELD_OUT)]
    return supervised(model, optimizer, data, held_out, scheduler=LambdaLR(optimizer, factor))


def _second_cycle(seed: int) -> Problem:
    """AdamW whose rate decays to 1 % and jumps back to its maximum, as for a second phase."""
    steps = 800
    clusters = Clusters(8, seeded(seed), 1.5)
    model = mlp(INPUTS, 64, 64, 8)
    optimizer = AdamW(model.parameters(), lr=2e-2)
    half = steps // 2

    def factor(step: int) -> float:
        return max(0.01, 1 - (step % half) / half)

    data, held_out = batches(clusters.sample(steps * ROWS)), [clusters.sample(HELD_OUT)]
    return supervised(model, optimizer, data, held_out, scheduler=LambdaLR(optimizer, factor))


def _horizon_doubled(seed: int) -> Problem:
    """A residual model of a noisy spiral; roll-outs of 6 steps, from the middle on of 12."""
    generator, steps, longest = seeded(seed), 600, 12
    model = mlp(4, 48, 4, activation=nn.Tanh)
    optimizer = AdamW(model.parameters(), lr=3e-3)

    def simulated(rows: int) -> Tensor:
        """Two coupled van der Pol oscillators, (rows, longest + 1, 4)."""
        x, path = 2.0 * torch.randn(rows, 4, generator=generator), []
        for _ in range(longest + 1):
            path.append(x)
            for _ in range(4):
                a, b, c, d = x.unbind(1)
                change = [b, (1 - a * a) * b - a + 0.5 * c, d, (1 - c * c) * d - 2 * c + 0.5 * a]
                x = x + 0.04 * torch.stack(change, dim=1).clamp(-20, 20)
        return torch.stack(path, dim=1)

    def rolled_out(path: Tensor, horizon: int) -> Tensor:
        x, loss = path[:, 0], torch.zeros(())
        for k in range(1, horizon + 1):
            x = x + model(x)
            loss = loss + (x - path[:, k]).square().sum(1).mean()
        return loss

    def loss_fn(batch: tuple[Tensor, int]) -> Tensor:
        return rolled_out(*batch)

    def step(batch: tuple[Tensor, int], update: Update) -> None:
        update(loss_fn(batch))

    data = [(simulated(16), longest // (2 if i < steps // 2 else 1)) for i in range(steps)]
    held_out = simulated(400)

    @torch.no_grad()
    def evaluate() -> float:
        return float(rolled_out(held_out, longest)) / longest

    return Problem(
        modules={"model": model},
        optimizers={MAIN: optimizer},
        batches=data,
        step=step,
        evaluate=evaluate,
        schedulers={MAIN: warmup_cosine(optimizer, steps, floor=0.05)},
        loss_fn=loss_fn,
    )


TASKS: tuple[Task, ...] = (
    Task(
        "rate_raised",
        "healthy",
        "held-out loss",
        _raised_rate,
        "An MLP classifier, SGD with momentum; the rate jumps to 10 times at a third of the run, "
        "the loss spikes and comes back by itself, and the rate decays to 0.",
    ),
    Task(
        "rate_second_cycle",
        "healthy",
        "held-out loss",
        _second_cycle,
        "An MLP classifier, AdamW; the rate decays to 1 %, restarts at its maximum, decays again.",
    ),
    Task(
        "horizon_doubled",
        "healthy",
        "held-out loss of 12 steps",
        _horizon_doubled,
        "A model of two coupled oscillators, AdamW; its roll-out doubles from 6 to 12 steps.",
        family="horizon and curriculum",
    ),
)
