"""Warnings of the driver: missing losses, and a GradScaler that is not in the state."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import ROLLS_BACK, Run

sgd = partial(SGD, lr=0.01)


def taken(driver: TorchDriver, run: Run, n: int) -> list[str]:
    for i in range(n):
        run.step(i)
        driver.poll_step()
    return driver.warnings


class Owner:
    """An object that owns a GradScaler, as `NativeScaler` of timm and MAE, or two for a GAN."""

    def __init__(self, **scalers: torch.amp.GradScaler) -> None:
        vars(self).update(scalers)

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in vars(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, each in state.items():
            vars(self)[name].load_state_dict(each)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("present", ["missing", "in the state", "in an object", "one of two"])
def test_a_grad_scaler_that_is_not_in_the_state_has_one_warning(fused: bool, present: str):
    run = Run(partial(SGD, lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    found = {
        "missing": {},
        "in the state": {"scaler": scaler},
        "in an object": {"scaler": Owner(_scaler=scaler)},
        "one of two": {"scaler": Owner(a=torch.amp.GradScaler("cpu"), b=scaler)},
    }
    driver = TorchDriver(run.state | found[present], ROLLS_BACK)
    for _ in range(3):
        run.optimizer.zero_grad()
        scaler.scale(run.model(torch.ones(1, 4, dtype=torch.float64)).sum()).backward()
        scaler.step(run.optimizer)
        scaler.update()
        driver.poll_step()
    assert len(driver.warnings) == (present == "missing")
    assert all('state={..., "scaler": scaler}' in line for line in driver.warnings)


def test_a_missing_loss_has_one_warning_after_a_while():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    assert taken(driver, run, 19) == []
    (line,) = taken(driver, run, 1)
    assert "healer.observe(loss)" in line
    assert len(taken(driver, run, 40)) == 1


def test_one_loss_is_enough():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    driver.observe(1.0)
    assert taken(driver, run, 30) == []
