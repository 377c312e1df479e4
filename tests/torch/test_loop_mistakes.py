"""Mistakes of a loop are noticed, once, and correct loops are not taken for one."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]
)

from healcore.runtime.healer import Healer
from healcore.torch import ObservedTooLateError, attach
from healcore.torch.driver import TorchDriver
from healcore.torch.loop_mistakes import HITS, NormCeiling
from tests.torch import policies
from tests.torch.driver.small_run import ROLLS_BACK, Run

# -- clipping by other code ------------------------------------------------------------------------


def warnings_of(norms: np.ndarray) -> int:
    ceiling = NormCeiling()
    return sum(ceiling.add(float(norm)) is not None for norm in norms)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_limit_is_noticed_once(share: float):
    """Also where it is reached at some steps only, and by gradients of few digits."""
    random = np.random.default_rng(0)
    limit = 0.3 * (1 + 5e-5 * random.standard_normal(1000)).astype(np.float32)
    norms = np.where(random.random(1000) < share, limit, 0.3 * random.random(1000))
    assert warnings_of(norms) == 1
    assert warnings_of(norms[: HITS - 1]) == 0


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.3])
def test_norms_without_a_limit(spread: float):
    random = np.random.default_rng(1)
    norms = np.exp(spread * random.standard_normal(10_000)).astype(np.float32)
    for drift in (0.0, 1e-5, -1e-5):
        assert warnings_of(norms * np.exp(drift * np.arange(10_000))) == 0


def test_a_constant_gradient_and_bad_values_are_no_limit():
    assert warnings_of(np.full(1000, 2.5)) == 0
    assert warnings_of(np.array([np.nan, np.inf, 0.0] * 100)) == 0


# -- observed after the step ----------------------------------------------------------------------


class Loop:
    """A loop with one parameter, written as the order of its calls."""

    def __init__(self, kind: Any = SGD, **options: Any) -> None:
        self.p = Parameter(torch.ones(3))
        self.optimizer = kind([self.p], **{"lr": 0.01, **options})
        self.heal = attach(self.optimizer, policies.SKIPS)

    def run(self, calls: str, observe: Any = None) -> None:
        """`B`ackward, `S`tep, `Z`ero_grad, and `O`bserve, of one loss."""
        loss = (self.p**2).sum()
        trained = loss / 4 + 0.1 * self.p.abs().sum() if "P" in calls else loss
        seen = loss.detach() if "D" in calls else loss.item() if "N" in calls else loss
        for call in calls:
            if call == "B":
                trained.backward()
            elif call == "S":
                self.optimizer.step()
            elif call == "Z":
                self.optimizer.zero_grad()
            elif call == "O":
                (observe or self.heal.observe)(seen)

    @property
    def steps(self) -> int:
        return int(self.heal.metrics()["heal/steps"])


@pytest.mark.parametrize("lr", [0.01, 0.0])
@pytest.mark.parametrize("calls", ["BSOZ", "ZBSO", "BSZO"])
def test_a_late_loss_is_an_error_at_the_second_step(calls: str, lr: float):
    loop = Loop(lr=lr)
    loop.run(calls)
    before = loop.p.detach().clone()
    with pytest.raises(ObservedTooLateError, match=r"before optimizer\.step"):
        loop.run(calls)
    assert torch.equal(loop.p, before)
    assert loop.steps == 1


@pytest.mark.parametrize("first", ["", "BSZ"])
@pytest.mark.parametrize("calls", ["OZBS", "BOSZ", "POBSZ", "DOBSZ"])
def test_a_loss_in_time_is_no_mistake(calls: str, first: str):
    """Also a part of what is trained on, a detached one, and after a first step without a loss."""
    loop = Loop()
    loop.run(first)
    for _ in range(4):
        loop.run(calls)
    assert loop.steps == 4 + bool(first)


def test_a_loop_may_begin_to_observe_later():
    loop = Loop()
    for i in range(9):
        loop.run("OZBS" if i % 3 == 2 else "BSZ")
    assert loop.steps == 9


def test_a_late_plain_number_is_logged(caplog: pytest.LogCaptureFixture):
    loop = Loop()
    with caplog.at_level(logging.WARNING, logger="healcore"):
        for _ in range(4):
            loop.run("NBSOZ")
    (record,) = caplog.records
    assert "one step late" in record.getMessage()


def test_a_late_loss_is_an_error_in_a_healer_too():
    loop = Loop()
    loop.heal.detach()
    healer = Healer(policies.SKIPS, state={"p": [loop.p], "optimizer": loop.optimizer})

    def train() -> None:
        with healer:
            for _ in healer.batches(range(5)):
                loop.run("BSOZ", healer.observe)

    with pytest.raises(ObservedTooLateError):
        train()


def test_both_optimizers_of_a_gan_may_have_one_loss():
    maker, judge = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    makes, judges = SGD([maker], lr=0.01), SGD([judge], lr=0.01)
    state = {"p": [maker, judge], "makes": makes, "judges": judges}
    with Healer(policies.SKIPS, state=state) as healer:
        for _ in healer.batches(range(5)):
            (judge**2).sum().backward()
            judges.step()
            loss = (maker * judge.detach()).sum()
            healer.observe(loss)
            loss.backward()
            makes.step()
            makes.zero_grad()
            judges.zero_grad()
    assert healer.step == 5


# -- a forgotten zero_grad ------------------------------------------------------------------------


def clears_data(loop: Loop) -> None:
    if loop.p.grad is not None:
        loop.p.grad.data.zero_()  # which raises no version


CLEARED = {
    "nothing": lambda loop: None,
    "clip": lambda loop: torch.nn.utils.clip_grad_norm_([loop.p], 1e-3),
    "none": lambda loop: loop.optimizer.zero_grad(),
    "zero": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "data": clears_data,
}


@pytest.mark.parametrize("cleared", CLEARED)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("by_product", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_a_forgotten_zero_grad_is_logged_once(
    caplog: pytest.LogCaptureFixture, cleared: str, parts: int, by_product: bool, fused: bool
):
    """Neither an accumulation, nor gradients of another network's backward pass, are one."""
    loop = Loop(AdamW, fused=fused)
    for _ in range(12):
        if cleared != "clip":
            CLEARED[cleared](loop)
        for _ in range(parts):
            (loop.p**2).sum().backward()
        if cleared == "clip":
            CLEARED[cleared](loop)
        loop.optimizer.step()
        if by_product:
            loop.p.sum().backward()
    assert sum("zero_grad()" in r.getMessage() for r in caplog.records) == (
        cleared in ("nothing", "clip")
    )
    assert not loop.p._backward_hooks


def test_a_healer_warns_of_a_forgotten_zero_grad():
    loop = Loop()
    loop.heal.detach()
    driver = TorchDriver({"p": [loop.p], "optimizer": loop.optimizer}, policies.SKIPS)
    for _ in range(12):
        driver.observe(1.0)
        (loop.p**2).sum().backward()
        loop.optimizer.step()
        driver.poll_step()
    assert sum("zero_grad()" in line for line in driver.warnings) == 1


# -- optimizers that are not in the state ---------------------------------------------------------

sgd = partial(SGD, lr=0.01)


def take(optimizer: Optimizer, *params: Any) -> None:
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
    take(SGD(other.parameters()), *other.parameters())
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
    before = len(_global_optimizer_post_hooks)
    driver = TorchDriver(Run(sgd).state, ROLLS_BACK)
    assert len(_global_optimizer_post_hooks) == before + 1
    driver.close()
    assert len(_global_optimizer_post_hooks) == before
    driver = TorchDriver(Run(sgd).state, ROLLS_BACK)
    del driver
    gc.collect()
    assert len(_global_optimizer_post_hooks) == before, "nor does a driver that was not closed"


def test_a_rejected_state_leaves_no_hook():
    before = len(_global_optimizer_post_hooks)
    state = {**Run(sgd).state, "empty": SGD([{"params": []}])}
    with pytest.raises(Exception, match="has no parameters"):
        TorchDriver(state, ROLLS_BACK)
    assert len(_global_optimizer_post_hooks) == before
