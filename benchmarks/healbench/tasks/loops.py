"""A user's own loop around one model: what it does before and after a step, and terms of its own.

The loop's number of a step comes with its batch, so a run that is rolled back repeats the same
edits. `damaged_once` is the other kind of program, whose counter no checkpoint has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from benchmarks.healbench.problem import MAIN, Problem, Update
from benchmarks.healbench.tasks.mixed_data import HELD_OUT, INPUTS, ROWS, Clusters, batches
from benchmarks.healbench.tasks.models import mlp, seeded, warmup_cosine

STEPS = 600
CLASSES = 8
Hook = Callable[[int, Any], None]


class Value:
    """A number that the loop keeps between steps."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        """The number."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Sets the number."""
        self.value = state["value"]


def program(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Any],
    loss_fn: Callable[[Any], Tensor],
    evaluate: Callable[[], float],
    *,
    before: Hook | None = None,
    term: Callable[[Any], Tensor] | None = None,
    after: Hook | None = None,
    scheduler: LRScheduler | None = None,
    modules: dict[str, nn.Module] | None = None,
    state: dict[str, Any] | None = None,
) -> Problem:
    """The loop of one model and optimizer.

    Args:
        model: trained with `optimizer`.
        optimizer: of the model's parameters.
        data: one entry for each step.
        loss_fn: the observed loss of an entry.
        evaluate: the metric; runs without gradients.
        before: called with the step's number and its entry before the forward pass.
        term: added to the loss after it has been observed.
        after: as `before`, after the optimizer's step; without gradients.
        scheduler: a cosine decay if None.
        modules: further modules that the loop keeps.
        state: further objects that the loop keeps.
    """

    def step(batch: tuple[int, Any], update: Update) -> None:
        if before is not None:
            before(*batch)
        loss = loss_fn(batch[1])
        if term is not None:
            unseen = term(batch[1])
            loss = loss + (unseen - unseen.detach())  # the arm observes the loss alone
        update(loss)
        if after is not None:
            with torch.no_grad():
                after(*batch)

    return Problem(
        modules={"model": model, **(modules or {})},
        optimizers={MAIN: optimizer},
        batches=list(enumerate(data)),
        step=step,
        evaluate=torch.no_grad()(evaluate),
        schedulers={MAIN: scheduler or warmup_cosine(optimizer, len(data))},
        state=state or {},
        loss_fn=lambda batch: loss_fn(batch[1]),
    )


def damaged_once(
    problem: Problem, before: int, damage: Callable[[Problem], None], steps: int = 1
) -> Problem:
    """The same problem, with `damage` done once to its objects.

    The count is no part of any checkpoint: going back does not bring the fault back.

    Args:
        problem: the healthy run.
        before: which iteration of the loop comes right after the damage, counted as executed.
        damage: changes weights or optimizer state in place.
        steps: iterations that the damage comes before.
    """
    healthy_step = problem.step
    executed = 0

    def step(batch: Any, update: Update) -> None:
        nonlocal executed
        if before <= executed < before + steps:
            damage(problem)
        executed += 1
        healthy_step(batch, update)

    problem.step, problem.fault = step, before
    return problem


def with_step_number(
    problem: Problem,
    *,
    numbers: Callable[[int], dict[str, Any]] | None = None,
    gradients: Callable[[int, nn.Module], None] | None = None,
) -> Problem:
    """The same program, with a loop that acts by the number of the step.

    The number comes with the batch, so a run that is rolled back does the same again.

    Args:
        problem: a program with a plain loop.
        numbers: of the optimizer, by the number of the step: written to `param_groups` before it.
        gradients: changes the gradients of a step, by its number, before the optimizer sees them.
    """
    plain_step, plain_loss, model = problem.step, problem.loss_fn, problem.modules["model"]
    assert plain_loss is not None
    now = 0

    def step(batch: tuple[int, Any], update: Update) -> None:
        nonlocal now
        now = batch[0]
        if numbers is not None:
            for group in problem.optimizers[MAIN].param_groups:
                group.update(numbers(now))
        plain_step(batch[1], update)

    problem.batches = list(enumerate(problem.batches))
    problem.step, problem.loss_fn = step, lambda batch: plain_loss(batch[1])
    problem.numbers = numbers
    if gradients is not None:
        problem.after_backward = torch.no_grad()(lambda: gradients(now, model))
    return problem


def start(seed: int) -> tuple[Clusters, nn.Sequential]:
    """Clusters of `CLASSES` classes, and an MLP that classifies them."""
    return Clusters(CLASSES, seeded(seed), 1.5), mlp(INPUTS, 64, 64, CLASSES)


def classifier(
    clusters: Clusters,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    data: Sequence[Any] | None = None,
    **options: Any,
) -> Problem:
    """Cross entropy on the clusters.

    Args:
        clusters: drawn from for the data and for the metric, the held-out loss.
        model: the classifier.
        optimizer: AdamW at 5e-3 if None.
        data: instead of `STEPS` batches of the clusters.
        options: of `program`.
    """
    data = batches(clusters.sample(STEPS * ROWS)) if data is None else data
    inputs, labels = clusters.sample(HELD_OUT)

    def evaluate() -> float:
        model.eval()
        return float(F.cross_entropy(model(inputs), labels))

    options = {"loss_fn": lambda batch: F.cross_entropy(model(batch[0]), batch[1]), **options}
    optimizer = optimizer or AdamW(model.parameters(), lr=5e-3)
    return program(model, optimizer, data, evaluate=evaluate, **options)


def noise_like(tensor: Tensor, number: int) -> Tensor:
    """Normal noise that is the same whenever a step of this number is taken."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(tensor.shape, generator=generator)
