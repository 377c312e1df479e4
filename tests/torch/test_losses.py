"""Losses that a loop observes: which are accepted, how they are averaged, and observed late."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from healcore.core.verdict import Cause
from healcore.runtime.healer import Healer
from healcore.torch import Healing, ObservedTooLateError, SignalError, attach
from tests.torch import policies
from tests.torch.optimizer_cases import Where, host_and_device


def healed(where: Where, engine: Any = policies.LOSSES) -> tuple[Parameter, AdamW, Healing]:
    p = Parameter(torch.ones(2))
    optimizer = AdamW([p], fused=True)
    return p, optimizer, attach(optimizer, engine, engine=where)


def take(p: Parameter, optimizer: AdamW, heal: Healing) -> float:
    p.grad = torch.ones(2)
    optimizer.step()
    return float(heal.metrics()["heal/loss"])


@host_and_device
def test_the_loss_is_nan_until_one_is_observed(where):
    p, optimizer, heal = healed(where)
    assert np.isnan(take(p, optimizer, heal))
    heal.observe(0.0)
    assert take(p, optimizer, heal) == 0


@host_and_device
@pytest.mark.parametrize(
    "loss",
    [
        2.5,
        np.float64(2.5),
        np.array([2.5], np.float32),
        torch.tensor(2.5),
        torch.tensor([[2.5]], dtype=torch.float64),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.tensor(2.5, dtype=torch.float16, requires_grad=True) * 1,
    ],
    ids=repr,
)
def test_one_number_of_any_kind_is_a_loss(where: Where, loss: Any):
    p, optimizer, heal = healed(where)
    heal.observe(loss)
    assert take(p, optimizer, heal) == 2.5


@host_and_device
@pytest.mark.parametrize(
    "loss",
    [
        3.5e38,
        -1e300,
        10**400,
        np.float64(1e300),
        torch.tensor(1e300, dtype=torch.float64),
        torch.tensor([1e300], dtype=torch.float64, requires_grad=True) * 1,
    ],
    ids=lambda loss: f"{loss:.6}" if isinstance(loss, float) else type(loss).__name__,
)
@pytest.mark.parametrize("weight", [1.0, 2.0])
@pytest.mark.parametrize("count", [1, 2])
def test_a_loss_that_float32_cannot_hold_is_not_finite(where, loss: Any, weight: float, count: int):
    p, optimizer, heal = healed(where)
    for _ in range(count):
        heal.observe(loss, weight=weight)
    take(p, optimizer, heal)
    decision = heal.last_decision()
    assert decision is not None
    assert decision.cause == Cause.NONFINITE_LOSS


def test_a_healed_float64_loop_survives_a_loss_that_float32_cannot_hold():
    model = torch.nn.Linear(2, 1, dtype=torch.float64)
    optimizer = SGD(model.parameters(), 1e-3)
    factors = [1.0] * 20 + [1e300] * 4 + [1.0] * 20
    losses = []

    def loss_fn(factor: float) -> torch.Tensor:
        return model(torch.ones(1, 2, dtype=torch.float64)).square().mean() * factor

    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, loss_fn=loss_fn, save_every=5) as healer:
        for factor in healer.batches(factors):
            loss = loss_fn(factor)
            healer.observe(loss)
            healer.observe_eval(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@host_and_device
def test_an_integer_is_a_loss(where: Where):
    p, optimizer, heal = healed(where)
    heal.observe(torch.tensor(3))
    assert take(p, optimizer, heal) == 3.0


@host_and_device
def test_a_step_is_judged_by_the_mean_of_its_micro_batches(where: Where):
    p, optimizer, heal = healed(where)
    for loss in (1.0, torch.tensor(2.0), torch.tensor(4.5)):
        heal.observe(loss)
    assert take(p, optimizer, heal) == 2.5
    heal.observe(7.0)
    assert take(p, optimizer, heal) == 7.0


@host_and_device
def test_a_loss_may_be_changed_in_place_afterwards(where: Where):
    p, optimizer, heal = healed(where)
    loss = torch.tensor(8.0)
    heal.observe(loss)
    loss /= 4
    assert take(p, optimizer, heal) == 8.0


@host_and_device
def test_discard_drops_the_losses_since_the_last_step(where: Where):
    p, optimizer, heal = healed(where)
    heal.observe(float("nan"))
    heal.discard()
    heal.observe(1.0)
    assert take(p, optimizer, heal) == 1.0
    assert int(heal.metrics()["heal/skips"]) == 0


@host_and_device
@pytest.mark.parametrize("loss", [float("nan"), torch.tensor(float("inf"))])
def test_a_loss_that_is_not_finite_is_a_loss_and_skips(where: Where, loss: Any):
    p, optimizer, heal = healed(where)
    heal.observe(loss)
    take(p, optimizer, heal)
    assert torch.equal(p.detach(), torch.ones(2))


@host_and_device
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (None, "got None"),
        (torch.ones(8), r"shape \(8,\).*mean"),
        (np.ones((2, 1)), r"shape \(2, 1\)"),
        (torch.ones(0), r"shape \(0,\)"),
        ("1.5", "'1.5' of type str"),
        (True, "bool"),
        (torch.tensor(True), "bool"),
        (1 + 2j, "complex"),
        (torch.tensor(1j), "complex"),
        (object(), "object"),
        (torch.ones((), device="meta"), "meta"),
    ],
    ids=lambda value: type(value).__name__,  # repr has an address: xdist collects by name
)
@pytest.mark.parametrize("method", ["observe", "observe_eval", "observe_update_norm"])
def test_a_value_that_is_no_loss_is_rejected_and_changes_nothing(
    where: Where, loss: Any, message: str, method: str
):
    p, optimizer, heal = healed(where)
    heal.observe(1.0)
    state = heal.state_dict()
    with pytest.raises(SignalError, match=message):
        getattr(heal, method)(loss)
    assert heal.state_dict() == state
    assert take(p, optimizer, heal) == 1.0


@host_and_device
def test_side_signals_reach_the_next_step_only(where: Where):
    p, optimizer, heal = healed(where, policies.EVERYTHING)
    assert heal.report().waiting_for == ("loss", "eval_loss", "update_norm")
    heal.observe(1.0)
    heal.observe_eval(torch.tensor(2.0))
    heal.observe_update_norm(0.5)
    take(p, optimizer, heal)
    first = heal.state_dict()["state"]["detectors"]
    heal.observe(1.0)
    take(p, optimizer, heal)
    names = heal.state_dict()["detectors"]
    second = heal.state_dict()["state"]["detectors"]
    for name in ("overfit", "update_spike"):
        assert first[names.index(name)] == second[names.index(name)]
    fresh = attach(AdamW([p]), policies.EVERYTHING).state_dict()["state"]["detectors"]
    for name in ("overfit", "update_spike"):
        assert first[names.index(name)] != fresh[names.index(name)]
    assert heal.report().waiting_for == ()


@host_and_device
def test_an_announced_change_is_no_alarm(where: Where):
    def jump(change_expected: bool) -> int:
        p, optimizer, heal = healed(where)
        for i in range(20):
            heal.observe(1.0 + 0.01 * (i % 3))
            take(p, optimizer, heal)
        if change_expected:
            heal.expect_change()
        heal.observe(50.0)
        take(p, optimizer, heal)
        return int(heal.metrics()["heal/alarms"])

    assert jump(change_expected=False) == 1
    assert jump(change_expected=True) == 0


# -- observed after the step ------------------------------------------------------------------

Loop = Callable[[Parameter, SGD, Healing], None]


def loss_of(p: Parameter) -> torch.Tensor:
    return (p**2).sum()


def late(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    loss.backward()
    optimizer.step()
    heal.observe(loss)
    optimizer.zero_grad()


def late_and_cleared_first(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    optimizer.zero_grad()
    loss = loss_of(p)
    loss.backward()
    optimizer.step()
    heal.observe(loss)


def late_and_cleared_before(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    heal.observe(loss)


def usual(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    heal.observe(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def after_backward(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    loss.backward()
    heal.observe(loss)
    optimizer.step()
    optimizer.zero_grad()


def of_a_part(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    heal.observe(loss)
    (loss / 4 + 0.1 * p.abs().sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def detached(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss = loss_of(p)
    heal.observe(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def unobserved(p: Parameter, optimizer: SGD, heal: Healing) -> None:
    loss_of(p).backward()
    optimizer.step()
    optimizer.zero_grad()


def built(lr: float = 0.01) -> tuple[Parameter, SGD, Healing]:
    p = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=lr)
    return p, optimizer, attach(optimizer, policies.SKIPS)


@pytest.mark.parametrize("lr", [0.01, 0.0])
@pytest.mark.parametrize("loop", [late, late_and_cleared_first, late_and_cleared_before])
def test_a_late_loss_is_an_error_at_the_second_step(loop: Loop, lr: float):
    p, optimizer, heal = built(lr)
    loop(p, optimizer, heal)
    before = p.detach().clone()
    with pytest.raises(ObservedTooLateError, match=r"before optimizer\.step"):
        loop(p, optimizer, heal)
    assert torch.equal(p, before)
    assert int(heal.metrics()["heal/steps"]) == 1


@pytest.mark.parametrize("first", [None, unobserved])
@pytest.mark.parametrize("loop", [usual, after_backward, of_a_part, detached])
def test_a_loss_in_time_is_none(loop: Loop, first: Loop | None):
    """After a first step without a loss, too, as one that fills the optimizer's state."""
    p, optimizer, heal = built()
    if first is not None:
        first(p, optimizer, heal)
    for _ in range(4):
        loop(p, optimizer, heal)
    assert int(heal.metrics()["heal/steps"]) == 4 + (first is not None)


def test_a_loop_may_begin_to_observe_later():
    p, optimizer, heal = built()
    for i in range(9):
        (usual if i % 3 == 2 else unobserved)(p, optimizer, heal)
    assert int(heal.metrics()["heal/steps"]) == 9


def test_a_late_plain_number_is_logged(caplog: pytest.LogCaptureFixture):
    p, optimizer, heal = built()
    with caplog.at_level(logging.WARNING, logger="healcore"):
        for _ in range(4):
            loss = loss_of(p)
            loss.backward()
            optimizer.step()
            heal.observe(loss.item())
            optimizer.zero_grad()
    (record,) = caplog.records
    assert "all losses come one step late" in record.getMessage()


def test_a_late_loss_is_an_error_in_a_healer_too():
    p = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.01)
    healer = Healer(policies.SKIPS, state={"p": [p], "optimizer": optimizer})

    def train() -> None:
        with healer:
            for _ in healer.batches(range(5)):
                late(p, optimizer, healer)  # type: ignore[arg-type]

    with pytest.raises(ObservedTooLateError):
        train()


def test_both_optimizers_of_a_gan_may_have_one_loss():
    maker, judge = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    makes, judges = SGD([maker], lr=0.01), SGD([judge], lr=0.01)
    state = {"p": [maker, judge], "makes": makes, "judges": judges}
    with Healer(policies.SKIPS, state=state) as healer:
        for _ in healer.batches(range(5)):
            loss_of(judge).backward()
            judges.step()
            loss = (maker * judge.detach()).sum()
            healer.observe(loss)
            loss.backward()
            makes.step()
            makes.zero_grad()
            judges.zero_grad()
    assert healer.step == 5
