"""The driver's part of a rollback: everything is restored, and no later state remains."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import NAN, ROLLS_BACK, Run, parameters, roll_back, single_record
from tests.torch.optimizer_cases import host_and_device

OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(AdamW, lr=0.01),
    "fused": partial(AdamW, lr=0.01, fused=True),
    "momentum": partial(SGD, lr=0.01, momentum=0.9),
    "fused momentum": partial(SGD, lr=0.01, momentum=0.9, fused=True),
    "fused nesterov": partial(SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "dampening": partial(SGD, lr=0.01, momentum=0.9, dampening=0.5, fused=True),
}


@host_and_device
@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_steps_again_are_the_same_to_the_bit(optimizer: str, saved: int, where: str):
    """Also from the snapshot before the first step, whose optimizer has no moments yet."""
    run = Run(OPTIMIZERS[optimizer], partial(ExponentialLR, gamma=0.9))
    driver = TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})
    store = driver.store(None)
    seen = []
    for i in range(5):
        if i == saved:
            store.save(i, driver.state(), healing=driver.engines())
        if i >= saved:
            seen.append(snapshot(run.optimizer))
        run.step(i)
    end = snapshot(run.optimizer)
    for _ in range(2):
        roll_back(driver, store.restore(saved, driver.state()))
        for i, before in enumerate(seen, saved):
            assert_same(snapshot(run.optimizer), before)
            run.step(i)
        assert_same(snapshot(run.optimizer), end)


@host_and_device
@pytest.mark.parametrize("optimizer", ["momentum", "fused momentum", "fused nesterov", "dampening"])
def test_the_first_step_is_skipped_after_a_rollback(optimizer: str, where: str):
    """Fused SGD makes its buffer at that step and leaves what lay in the memory."""
    run, twin = Run(OPTIMIZERS[optimizer]), Run(OPTIMIZERS[optimizer])
    driver = TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})
    store = driver.store(None)
    store.save(0, driver.state(), healing=driver.engines())
    live = driver.engines()
    run.step(0)
    driver.load(store.restore(0, driver.state()).state, live)
    run.step(1, NAN)
    driver.load(None, live)  # no cut: to be compared with a run that knows of nothing
    for i in (2, 3):
        for a, b in zip(run.step(i), twin.step(i), strict=True):
            assert torch.equal(a, b)


def test_gradients_and_losses_of_an_unfinished_step_are_dropped():
    run = Run(OPTIMIZERS["AdamW"])
    driver = TorchDriver(run.state, ROLLS_BACK)
    store = driver.store(None)
    store.save(0, driver.state(), healing=driver.engines())
    driver.observe(1e6)
    run.backward(0, NAN)
    driver.load(store.restore(0, driver.state()).state)
    assert all(p.grad is None for p in run.model.parameters())
    assert driver.may_save()
    driver.observe(2.0)
    run.step(0)
    assert single_record(driver).loss == 2.0


@pytest.mark.parametrize("fused", [True, False])
def test_the_scalers_state_is_restored_too(fused: bool):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    run = Run(partial(AdamW, lr=0.01, fused=fused), dtype=torch.float32)
    state = {**run.state, "scaler": scaler}
    driver = TorchDriver(state, ROLLS_BACK)
    store = driver.store(None)

    def step(i: int, factor: float = 1.0) -> None:
        run.optimizer.zero_grad()
        loss = torch.cat([p.flatten() for p in run.model.parameters()]).sum() * factor * (i + 1)
        scaler.scale(loss).backward()
        scaler.step(run.optimizer)
        scaler.update()

    step(0)
    store.save(1, driver.state(), healing=driver.engines())
    weights = None
    for _ in range(2):
        driver.steps()
        step(1)  # the second good one: the scale doubles
        assert scaler.get_scale() == 16.0
        assert single_record(driver).step == 2
        step(2, NAN)  # and is halved again, which is not ours to judge
        assert scaler.get_scale() == 8.0
        handle = driver.steps()
        assert handle is None or handle.steps()[0][0].step == 2
        step(3)
        found = parameters(state)
        assert weights is None or all(map(torch.equal, weights, found))
        weights = found
        roll_back(driver, store.restore(1, driver.state()))
        assert scaler.state_dict()["_growth_tracker"] == 1
