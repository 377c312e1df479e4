"""Losses that a loop observes: which are accepted, and how they are averaged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core.verdict import Cause
from healcore.errors import SignalError
from healcore.torch import Healing, attach
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
@pytest.mark.parametrize(
    "loss",
    [
        2,
        np.array([2.5], np.float32),
        torch.tensor([[2.5]], dtype=torch.float64),
        torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True) * 1,
    ],
    ids=repr,
)
def test_one_number_of_any_kind_is_a_loss(where: Where, loss: Any):
    p, optimizer, heal = healed(where)
    heal.observe(loss)
    assert take(p, optimizer, heal) == torch.as_tensor(loss).item()


@host_and_device
@pytest.mark.parametrize(
    "loss",
    [
        10**400,
        float("nan"),
        torch.tensor(float("inf")),
        torch.tensor([1e300], dtype=torch.float64, requires_grad=True) * 1,
    ],
    ids=lambda loss: f"{loss:.6}" if isinstance(loss, float) else type(loss).__name__,
)
def test_a_loss_that_float32_cannot_hold_skips(where: Where, loss: Any):
    p, optimizer, heal = healed(where)
    for _ in range(2):
        heal.observe(loss, weight=2.0)
    take(p, optimizer, heal)
    decision = heal.last_decision()
    assert decision is not None
    assert decision.cause == Cause.NONFINITE_LOSS
    assert torch.equal(p.detach(), torch.ones(2))


@host_and_device
def test_a_step_is_judged_by_the_mean_of_its_micro_batches(where: Where):
    p, optimizer, heal = healed(where)
    for loss in (1.0, torch.tensor(2.0), torch.tensor(4.5)):
        heal.observe(loss)
        loss /= 4  # the loop may change it in place
    assert take(p, optimizer, heal) == 2.5
    heal.observe(7.0)
    assert take(p, optimizer, heal) == 7.0


@host_and_device
@pytest.mark.parametrize(
    ("method", "loss", "word"),
    [
        ("observe", torch.ones(8), "mean"),
        ("observe", torch.tensor(1j), "complex"),
        ("observe_eval", None, "None"),
        ("observe_update_norm", torch.tensor(True), "bool"),
    ],
    ids=lambda value: type(value).__name__,  # repr has an address: xdist collects by name
)
def test_a_value_that_is_no_loss_is_rejected_and_changes_nothing(
    where: Where, method: str, loss: Any, word: str
):
    p, optimizer, heal = healed(where)
    heal.observe(1.0)
    state = heal.state_dict()
    with pytest.raises(SignalError, match=word):
        getattr(heal, method)(loss)
    assert heal.state_dict() == state
    assert take(p, optimizer, heal) == 1.0


@host_and_device
def test_side_signals_reach_the_next_step_only(where: Where):
    p, optimizer, heal = healed(where, policies.EVERYTHING)
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
