"""A `loss_fn` that draws random numbers, or that differentiates.

Two sets of weights are compared with the same random numbers, and the run draws its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.torch.driver.compared_run import Run, left_alone

cross_entropy = nn.functional.cross_entropy
Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def torch_draw() -> float:
    return float(torch.rand(()))


def numpy_draw() -> float:
    return float(np.random.rand())  # noqa: NPY002 -- users do


@pytest.mark.parametrize("gives_loss", [False, True], ids=["observe", "loss"])
@pytest.mark.parametrize("draw", [torch_draw, numpy_draw, random.random])
def test_both_sides_draw_the_same_numbers(tmp_path, draw, gives_loss):
    """A training loss had other draws than a comparison has, so it is evaluated again."""
    run, drawn = Run(), list[tuple[int, float]]()

    def loss_fn(number: int) -> torch.Tensor:
        number_drawn = draw()
        if not torch.is_grad_enabled() and number:  # the Healer tries the first batch alone
            drawn.append((number, number_drawn))
        return run.loss(number) * (0.5 + number_drawn)

    healer = run.train(tmp_path, loss_fn=loss_fn, gives_loss=gives_loss, steps=310)
    assert healer.rollbacks == 0
    assert len(drawn) >= 6
    assert drawn[::2] == drawn[1::2]


# -- adversarial training, gradient penalties, inner loops ----------------------------------------


def by_grad(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One signed step away from the label, from a random start."""
    x = x + 0.01 * float(np.random.rand())  # noqa: NPY002 -- users do
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(x), y), x)
    return (x + 0.1 * slope.sign()).detach()


def by_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same, with a backward pass that reaches the parameters too."""
    x = x.clone().requires_grad_()
    cross_entropy(model(x), y).backward()
    assert x.grad is not None
    slope = x.grad
    model.zero_grad()
    return (x + 0.1 * slope.sign()).detach()


class Attacked(Run):
    """A run whose loss is of attacked points."""

    def __init__(self, attack: Attack) -> None:
        super().__init__()
        self.attack = attack

    def loss(self, number: int) -> Tensor:
        x, y = self.batch(number)
        return cross_entropy(self.model(self.attack(self.model, x, y)), y)


@pytest.mark.parametrize("attack", [by_grad, by_backward])
def test_an_attacked_run_is_compared_and_ends_as_without(tmp_path, attack):
    ended = []
    for asks in (False, True):
        np.random.seed(0)  # noqa: NPY002
        run, folder = Attacked(attack), tmp_path / str(asks)
        healer = run.train(folder, asks=asks, steps=250)
        left_alone(folder, healer)
        ended.append(run.model.state_dict())
    comparison: Any = healer._loop.recovery.dominance
    assert comparison.is_enabled
    assert comparison._budget._prices, "weights were compared"
    plain, compared = ended
    assert all(torch.equal(plain[name], compared[name]) for name in plain)
