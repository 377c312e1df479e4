"""Training whose weights or optimizer state are damaged once, between two steps.

The data are healthy throughout, and the damage happens once in time: a run that goes back to a
checkpoint from before it does not meet it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.healbench.problem import MAIN, Problem, Task, Update
from benchmarks.healbench.tasks.learning_rates import LM_METRIC, norm_free_lm

_TOP_EXPONENT_BIT = 2.0**16
"""By how much a float16 below 2 grows when the top bit of its exponent flips."""


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


def _weight(problem: Problem, name: str) -> nn.Parameter:
    return problem.modules["model"].get_parameter(name)


def _moments(optimizer: Optimizer, name: str) -> list[Tensor]:
    return [state[name] for state in optimizer.state.values() if name in state]


@torch.no_grad()
def _flip_weight(problem: Problem) -> None:
    flat = _weight(problem, "blocks.0.mlp.2.weight").view(-1)
    flat[flat.abs().argmax()] *= _TOP_EXPONENT_BIT


def _flip_moment(problem: Problem) -> None:
    weight = _weight(problem, "blocks.1.mlp.0.weight")
    problem.optimizers[MAIN].state[weight]["exp_avg_sq"].zero_()


def _forget_second_moments(problem: Problem) -> None:
    for second in _moments(problem.optimizers[MAIN], "exp_avg_sq"):
        second.mul_(1e-12)


def _bit_flip_weight(seed: int) -> Problem:
    return damaged_once(norm_free_lm(seed), 400, _flip_weight)


def _bit_flip_moment(seed: int) -> Problem:
    return damaged_once(norm_free_lm(seed), 400, _flip_moment)


def _poisoned_resume(seed: int) -> Problem:
    return damaged_once(norm_free_lm(seed), 300, _forget_second_moments)


def _lm_task(
    name: str, build: Callable[[int], Problem], about: str, *, quick: bool = False
) -> Task:
    return Task(name, "sick", LM_METRIC, build, about, reference="norm_free_lm", quick=quick)


TASKS: tuple[Task, ...] = (
    _lm_task(
        "bit_flip_weight",
        _bit_flip_weight,
        "The norm-free byte model; after 400 steps one weight becomes 65,536 times as large.",
    ),
    _lm_task(
        "bit_flip_moment",
        _bit_flip_moment,
        "The same; after 400 steps the second moments of one weight matrix read as zero.",
    ),
    _lm_task(
        "poisoned_resume",
        _poisoned_resume,
        "The same; after 300 steps all second moments are lost, and the first ones are not.",
        quick=True,
    ),
)
