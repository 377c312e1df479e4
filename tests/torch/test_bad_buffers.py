"""`attach` says once that NaN of a skipped step stays in buffers, which it cannot restore."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from healcore.torch import attach


class Centred(nn.Module):
    """Keeps a moving average in a buffer of its own, and has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("mask", torch.full((2,), -math.inf))  # of a kind that is no fault

    def forward(self, x: Tensor) -> Tensor:
        self.average: Tensor = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


class Images(nn.Sequential):
    """A layer for images, in a model of vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :, None, None].expand(-1, -1, 2, 2)).mean((2, 3))


def lines_of(layer: nn.Module, capsys: Any, *, bad: tuple[int, ...] = (3, 5, 8)) -> list[str]:
    """What training with some batches of NaN prints about buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    heal = attach(optimizer)
    for i in range(10):
        batch = torch.randn(16, 4)
        if i in bad:
            batch[0, 0] = math.nan
        loss = (model(batch) - 1).square().mean()
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [line for line in capsys.readouterr().err.splitlines() if "evaluation" in line]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.BatchNorm1d(8), "running_mean of BatchNorm1d, running_var of BatchNorm1d"),
        (nn.BatchNorm1d(8, affine=False, momentum=None), "running_mean of BatchNorm1d, running_v"),
        (Images(nn.BatchNorm2d(8)), "running_mean of BatchNorm2d, running_var of BatchNorm2d"),
        (Images(nn.InstanceNorm2d(8, track_running_stats=True)), "running_mean of InstanceNorm2d"),
        (torch.compile(nn.BatchNorm1d(8), backend="eager"), "running_mean of BatchNorm1d, running"),
        (Centred(), "average of Centred. "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nan_that_stays_in_buffers_is_said_once(layer: nn.Module, names: str, capsys: Any):
    (line,) = lines_of(layer, capsys)
    assert line.startswith(f"healcore: SGD: there is NaN in {names}")
    assert "Healer" in line


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(8).eval(), nn.LayerNorm(8), nn.BatchNorm1d(8, track_running_stats=False)],
    ids=["frozen", "LayerNorm", "no statistics"],
)
def test_without_nan_in_buffers_nothing_is_said(layer: nn.Module, capsys: Any):
    assert not lines_of(layer, capsys)


def test_a_gradient_of_nan_alone_leaves_no_nan_and_no_line(capsys: Any):
    class BadBackward(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            out.register_hook(lambda grad: grad * math.nan)
            return out

    assert not lines_of(BadBackward(8), capsys)
