"""Warnings of the driver: missing losses."""

from __future__ import annotations

from functools import partial

from torch.optim import SGD

from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import ROLLS_BACK, Run

sgd = partial(SGD, lr=0.01)


def taken(driver: TorchDriver, run: Run, n: int) -> list[str]:
    for i in range(n):
        run.step(i)
        driver.poll_step()
    return driver.warnings


def test_a_missing_loss_has_one_warning_after_a_while():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    assert taken(driver, run, 19) == []
    (line,) = taken(driver, run, 1)
    assert "healer.observe(loss)" in line
    assert len(taken(driver, run, 40)) == 1
