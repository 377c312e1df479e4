"""Warnings of the driver: missing losses, and a GradScaler that is not in the state."""

from __future__ import annotations

from functools import partial

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


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("present", ["missing", "in the state"])
def test_a_grad_scaler_that_is_not_in_the_state_has_one_warning(fused: bool, present: str):
    run = Run(partial(SGD, lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    found = {
        "missing": {},
        "in the state": {"scaler": scaler},
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
