"""Warnings of the driver: optimizers that are not in the state, losses that are missing."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks as hooks,  # pyright: ignore[reportPrivateUsage]
)

from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import CLIPS, ROLLS_BACK, Run

sgd = partial(SGD, lr=0.01)


def steps(optimizer: Optimizer, *params: Any) -> None:
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_replaced_optimizer_has_one_warning():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    run.step(0)
    assert driver.warnings == []
    run.optimizer = AdamW(run.model.parameters())
    for i in range(3):
        run.step(i)
    (line,) = driver.warnings
    assert line.startswith("an optimizer (AdamW) that is not in the state")
    assert 'trains parameters of "model"' in line
    driver.warnings.clear()
    run.step(4)
    assert driver.warnings == []
    run.optimizer = SGD(run.model.parameters())
    run.step(5)
    assert len(driver.warnings) == 1
    driver.close()
    run.optimizer = SGD(run.model.parameters())
    run.step(6)
    assert len(driver.warnings) == 1


def test_optimizers_of_other_models_have_no_warning():
    run, other = Run(sgd), nn.Linear(2, 2)
    driver = TorchDriver(run.state, ROLLS_BACK)
    steps(SGD(other.parameters()), *other.parameters())
    assert driver.warnings == []


def test_an_optimizer_stepped_by_one_of_the_state_has_no_warning():
    class Wrapper(SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.01)
            self.inner = AdamW(p for group in self.param_groups for p in group["params"])

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    run = Run(Wrapper)
    driver = TorchDriver(run.state, ROLLS_BACK)
    run.step(0)
    assert driver.warnings == []
    run.optimizer.inner.step()  # type: ignore[attr-defined]
    assert len(driver.warnings) == 1, "but not when stepped past it"


def test_a_new_optimizer_at_every_step_has_a_limited_number_of_warnings():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    for i in range(50):
        run.optimizer = SGD(run.model.parameters())
        run.step(i)
    assert 1 <= len(driver.warnings) <= 10


def test_the_hook_is_removed_with_the_driver():
    gc.collect()  # other tests have left theirs open
    before = len(hooks)
    driver = TorchDriver(Run(sgd).state, ROLLS_BACK)
    assert len(hooks) == before + 1
    driver.close()
    assert len(hooks) == before
    driver = TorchDriver(Run(sgd).state, ROLLS_BACK)
    del driver
    gc.collect()
    assert len(hooks) == before, "nor does one that nobody closed"


def test_a_rejected_state_leaves_no_hook():
    before = len(hooks)
    state = {**Run(sgd).state, "empty": SGD([{"params": []}])}
    with pytest.raises(Exception, match="has no parameters"):
        TorchDriver(state, ROLLS_BACK)
    assert len(hooks) == before


# -- losses ---------------------------------------------------------------------------------------


def taken(driver: TorchDriver, run: Run, n: int) -> list[str]:
    for i in range(n):
        run.step(i)
        driver.poll_step()
    return driver.warnings


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_a_grad_scaler_that_is_not_in_the_state_has_one_warning(fused: bool, present: bool):
    run = Run(partial(SGD, lr=0.01, fused=fused))
    scaler = torch.amp.GradScaler("cpu")
    state = run.state | ({"scaler": scaler} if present else {})
    driver = TorchDriver(state, ROLLS_BACK)
    for _ in range(3):
        run.optimizer.zero_grad()
        scaler.scale(run.model(torch.ones(1, 4, dtype=torch.float64)).sum()).backward()
        scaler.step(run.optimizer)
        scaler.update()
        driver.poll_step()
    assert len(driver.warnings) == (not present)
    assert all('state={..., "scaler": scaler}' in line for line in driver.warnings)


def test_a_missing_loss_has_one_warning_after_a_while():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    assert taken(driver, run, 19) == []
    (line,) = taken(driver, run, 1)
    assert line == (
        "no loss has been observed in 20 steps: call healer.observe(loss); detectors that read "
        "it are inactive"
    )
    assert len(taken(driver, run, 40)) == 1


def test_one_loss_is_enough():
    run = Run(sgd)
    driver = TorchDriver(run.state, ROLLS_BACK)
    driver.observe(1.0)
    assert taken(driver, run, 30) == []


def test_a_closures_loss_counts_as_observed():
    run = Run(partial(torch.optim.LBFGS, max_iter=2))
    driver = TorchDriver(run.state, ROLLS_BACK)
    assert taken(driver, run, 30) == []


def test_policies_that_read_no_loss_have_no_warning():
    run = Run(sgd)
    driver = TorchDriver(run.state, CLIPS)
    engine = driver.healings["optimizer"].engine
    assert ("loss" in engine.needs) == bool(taken(driver, run, 30))
