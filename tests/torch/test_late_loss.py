"""`observe` after the step is an error; whatever else a loop does is not."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD

from healcore.runtime.healer import Healer
from healcore.torch import Healing, ObservedTooLateError, attach
from tests.torch import policies

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


def test_a_loop_that_begins_to_observe_later_is_fine():
    p, optimizer, heal = built()
    for i in range(9):
        (usual if i % 3 == 2 else unobserved)(p, optimizer, heal)
    assert int(heal.metrics()["heal/steps"]) == 9


def test_a_late_number_cannot_be_told_for_sure_and_is_a_line(caplog: pytest.LogCaptureFixture):
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


def test_in_a_healer_too():
    p = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.01)
    healer = Healer(policies.SKIPS, state={"p": [p], "optimizer": optimizer})

    def train() -> None:
        with healer:
            for _ in healer.batches(range(5)):
                late(p, optimizer, healer)  # type: ignore[arg-type]

    with pytest.raises(ObservedTooLateError):
        train()


def test_one_loss_of_a_gan_for_both_optimizers_is_fine():
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
