"""Two sets of weights are compared with the same random numbers, and the run draws its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.torch.driver.compared_run import Run


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
