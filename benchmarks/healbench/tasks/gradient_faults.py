"""Faults of the gradients: not unscaled, no longer clipped, replaced by random numbers.

What is done to the gradients goes by the number of the step, which comes with the batch: a run that
is rolled back does the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn

from benchmarks.healbench.problem import Problem, task
from benchmarks.healbench.tasks.loops import noise_like, with_step_number
from benchmarks.healbench.tasks.short_runs import (
    METRICS,
    PLACES,
    adamw_mlp,
    clipping_until,
    momentum_mlp,
    unclipped_regression,
)

FAMILY = "gradients"
LOSS_SCALE = 4096.0
"""Factor by which gradients are too large that were not divided by the scale of the loss."""


def unscaled_steps(first: int) -> range:
    """Four steps, five apart."""
    return range(first, first + 20, 5)


def garbage_steps(first: int) -> range:
    """Eight steps in a row."""
    return range(first, first + 8)


def _unscale_forgotten(seed: int, build: Callable[[int], Problem], bad: Collection[int]) -> Problem:
    """The gradients of the `bad` steps are those of the scaled loss."""

    def gradients(step: int, model: nn.Module) -> None:
        if step in bad:
            for weight in model.parameters():
                assert weight.grad is not None
                weight.grad.mul_(LOSS_SCALE)

    return with_step_number(build(seed), gradients=gradients)


def _garbage(seed: int, build: Callable[[int], Problem], bad: Collection[int]) -> Problem:
    """Standard normal numbers take the place of the gradients of the `bad` steps."""

    def gradients(step: int, model: nn.Module) -> None:
        if step in bad:
            for number, weight in enumerate(model.parameters()):
                assert weight.grad is not None
                weight.grad.copy_(noise_like(weight, 100 * step + number))

    return with_step_number(build(seed), gradients=gradients)


def _clip_forgotten(seed: int, unclipped: Callable[[int], Problem], first: int) -> Problem:
    """The program clips its gradients only up to a step."""
    return clipping_until(unclipped(seed), first)


def _sick(name: str, healthy: str, about: str, make: Callable[..., Any], **options: Any) -> None:
    register = task(
        FAMILY, METRICS[healthy], name=name, about=f"`{healthy}`; {about}.", reference=healthy
    )
    register(partial(make, **options))


for _place, _first in PLACES.items():
    _sick(
        f"unscaled_{_place}",
        "momentum_mlp",
        f"the gradients of 4 steps from step {_first} on are 4096 times as large",
        _unscale_forgotten,
        build=momentum_mlp,
        bad=unscaled_steps(_first),
    )
_sick(
    "unscaled_adamw_middle",
    "adamw_mlp",
    f"the gradients of 4 steps from step {PLACES['middle']} on are 4096 times as large",
    _unscale_forgotten,
    build=adamw_mlp,
    bad=unscaled_steps(PLACES["middle"]),
)
for _place, _first in PLACES.items():
    _sick(
        f"clip_forgotten_{_place}",
        "clipped_regression",
        f"it clips its gradients only up to step {_first}",
        _clip_forgotten,
        unclipped=unclipped_regression,
        first=_first,
    )
for _place, _first in PLACES.items():
    _sick(
        f"garbage_gradients_{_place}",
        "momentum_mlp",
        f"standard normal numbers take the place of 8 gradients from step {_first} on",
        _garbage,
        build=momentum_mlp,
        bad=garbage_steps(_first),
    )
