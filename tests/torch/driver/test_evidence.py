"""Which tensors are named, by which name, and with which norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW

from healcore.core.verdict import Cause
from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import NAN, ROLLS_BACK, single_record
from tests.torch.optimizer_cases import host_and_device

WARMUP = 6
"""Steps until the spike detector is warm."""


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))
        self.head = nn.Parameter(torch.ones(1))


def step(
    driver: TorchDriver, norms: dict[str, float], module: nn.Module, usual: float = 1.0
) -> Any:
    """One step whose gradients have these norms, `usual` where none is given."""
    for name, p in module.named_parameters():
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = norms.get(name, usual)
    driver.healings["optimizer"].optimizer.step()
    return single_record(driver)


def driver_of(module: nn.Module, where: str = "host", **more: Any) -> TorchDriver:
    state = {"model": module, "optimizer": AdamW(module.parameters(), fused=True), **more}
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})
    for i in range(WARMUP):
        assert step(driver, {}, module, 1.0 + 0.01 * (i % 2)).evidence == ()
    return driver


@host_and_device
def test_nonfinite_gradients_are_named_first_and_then_what_stood_out(where: str):
    net = Net()
    driver = driver_of(net, where)
    bad = {"layers.0.weight": 5.0, "layers.1.weight": NAN, "head": 50.0, "layers.2.weight": 3.0}
    record = step(driver, bad, net)
    assert record.cause & Cause.NONFINITE_GRAD
    assert [e.name for e in record.evidence] == ["layers.1.weight", "head", "layers.0.weight"]
    assert str([e.grad_norm for e in record.evidence]) == "[nan, 50.0, 5.0]"


def test_a_spike_is_compared_with_the_last_step_without_an_alarm():
    net = Net()
    driver = driver_of(net)
    for _ in range(2):  # the first bad step is not what is usual at the second
        record = step(driver, {"layers.2.weight": 100.0}, net)
        assert record.cause == Cause.GRAD_SPIKE
        assert [(e.name, e.grad_norm) for e in record.evidence] == [("layers.2.weight", 100.0)]


def test_parameters_of_several_modules_and_of_none_have_longer_names():
    body, head, alone = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), torch.ones(1)
    alone = nn.Parameter(alone)
    optimizer = SGD([{"params": [body.weight]}, {"params": [head.weight, alone]}])
    state = {"body": torch.compile(body), "head": head, "extra": alone, "optimizer": optimizer}
    driver = TorchDriver(state, ROLLS_BACK)
    for p in (body.weight, head.weight, alone):
        p.grad = torch.full_like(p, NAN)
    optimizer.step()
    assert [e.name for e in single_record(driver).evidence] == [
        "body.weight",
        "head.weight",
        "optimizer.param_groups[1]['params'][1]",
    ]


@host_and_device
def test_added_parameters_are_judged_named_and_skipped(where: str):
    torch.manual_seed(0)
    body, head = nn.Linear(3, 2), nn.Linear(2, 1)
    optimizer = AdamW(body.parameters(), lr=0.01)
    state = {"body": body, "head": head, "optimizer": optimizer}
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": where})

    def backward() -> None:
        optimizer.zero_grad()
        head.zero_grad()
        head(body(torch.ones(4, 3))).mean().backward()

    for i in range(WARMUP + 1):
        if i == WARMUP:
            optimizer.add_param_group({"params": head.parameters(), "lr": 0.02})
        backward()
        optimizer.step()
        assert single_record(driver).cause == 0
    before = snapshot(optimizer)
    backward()
    assert head.weight.grad is not None
    head.weight.grad.fill_(NAN)
    optimizer.step()
    record = single_record(driver)
    assert record.skip
    assert [each.name for each in record.evidence] == ["head.weight"]
    assert_same(snapshot(optimizer), before)
