"""A `loss_fn` with side effects, and first batches that the loop skips.

A run ends as without healcore, or the first batch is an error.
"""

from __future__ import annotations

import contextlib
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from healcore import Healer, Logging
from healcore.errors import SignalError

calls: list[Any] = []


def batches() -> list[Any]:
    make = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 4, generator=make), "more": [torch.randn(8, 1, generator=make)]}
        for _ in range(120)
    ]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.hidden = nn.Linear(4, 1), torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["more"][0]).square().mean()


def warm_up(model: nn.Module, batch: Any) -> torch.Tensor:
    calls.append(batch)
    return mse(model, batch) * min(1, len(calls) / 50)


class Carries:
    """An object with state, in an attribute and in a dictionary."""

    def __init__(self) -> None:
        self.n, self.seen = 0, {"x": torch.zeros(8, 4)}

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.n += 1
        x, self.seen["x"] = batch["x"] + self.seen["x"] / self.n, batch["x"]
        return (model(x) - batch["more"][0]).square().mean()


def keeps_hidden(model: Any, batch: Any) -> torch.Tensor:
    model.hidden = model.hidden * 0.9 + batch["x"].mean().detach()
    return mse(model, batch) + (model.linear.weight * model.hidden).mean()


def draws(model: nn.Module, batch: Any) -> torch.Tensor:
    mask = torch.from_numpy(np.random.rand(8, 4) > 0.5)  # noqa: NPY002
    return (model(batch["x"] * mask + random.random()) - batch["more"][0]).square().mean()


def copies(model: nn.Module, batch: Any) -> torch.Tensor:
    batch = dict(batch)
    return (model(batch.pop("x").clone().sub_(1)) - batch["more"][0]).square().mean()


def run(function: Callable[..., Any], data: list[Any], *, healed: bool) -> tuple[torch.Tensor, Any]:
    """The weights and the Healer of a run that skips batches that are None or too short."""
    calls.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state = {"model": model, "optimizer": optimizer}
    loss_fn = function if isinstance(function, nn.Module) else lambda batch: function(model, batch)
    log = Logging(console=False)
    healer = Healer("default", state=state, loss_fn=loss_fn, logging=log) if healed else None
    with healer or contextlib.nullcontext():
        for batch in healer.batches(data) if healer else data:
            if batch is None or len(batch) < 2:
                continue
            (healer.loss(batch) if healer else loss_fn(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.linear.weight.detach(), healer


@pytest.mark.parametrize("kind", [mse, copies, draws, warm_up, Carries, keeps_hidden])
def test_the_first_batch_changes_no_state_of_the_loss_fn(kind):
    made = [Carries() if kind is Carries else kind for _ in range(2)]
    expected, _ = run(made[0], batches(), healed=False)
    weights, _ = run(made[1], batches(), healed=True)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("kind", [warm_up, Carries()])
def test_weights_are_not_compared_by_a_loss_fn_with_state(kind, caplog):
    run(kind, batches()[:4], healed=True)
    assert "keeps state" in caplog.text


@pytest.mark.parametrize("convert", [dict, UserDict])
@pytest.mark.parametrize(
    ("write", "part"),
    [
        (lambda batch: batch.pop("x"), "'x'"),
        (lambda batch: batch.update(x=batch["x"] / 255), "batch['x']"),
        (lambda batch: batch["more"][0].clamp_(0), "batch['more'][0]"),
        (lambda batch: batch["more"].append(1), "batch['more']"),
    ],
)
def test_a_loss_fn_that_changes_its_batch_is_an_error(convert, write, part):
    data = [convert(each) for each in batches()[:3]]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse(model, batch)
        write(batch)
        return loss

    with pytest.raises(SignalError) as raised:
        run(loss_fn, data, healed=True)
    assert part in str(raised.value)


@pytest.mark.parametrize("first", [None, {}, {"x": torch.ones(1, 4)}])
def test_a_first_batch_that_the_loop_skips_is_no_error(first):
    expected, _ = run(mse, batches(), healed=False)
    weights, _ = run(mse, [first, first, *batches()], healed=True)
    assert torch.equal(weights, expected)
