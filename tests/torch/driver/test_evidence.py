"""Which tensors are named, by which name, and with which norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from healcore.core.verdict import Cause
from healcore.torch.driver import TorchDriver
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


def test_a_loss_that_is_nan_alone_has_no_evidence():
    net = Net()
    driver = driver_of(net)
    driver.observe(NAN)
    record = step(driver, {}, net)
    assert record.cause == Cause.NONFINITE_LOSS
    assert record.evidence == ()


def test_a_parameter_without_a_gradient_does_not_shift_the_names():
    net = Net()
    driver = driver_of(net)
    for name, p in net.named_parameters():
        p.grad = None if name == "layers.0.weight" else torch.full_like(p, NAN)
    driver.healings["optimizer"].optimizer.step()
    assert [e.name for e in single_record(driver).evidence] == [
        "head",
        "layers.1.weight",
        "layers.2.weight",
    ]


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


def test_a_scalers_scale_is_divided_out():
    net = Net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    driver = driver_of(net, scaler=scaler)
    scaler.scale(torch.ones(()))  # makes the scale
    for name, p in net.named_parameters():
        p.grad = torch.zeros_like(p)
        p.grad.view(-1)[0] = 1024.0 * (200.0 if name == "head" else 1.0)
    scaler.step(driver.healings["optimizer"].optimizer)
    scaler.update()
    assert [(e.name, e.grad_norm) for e in single_record(driver).evidence] == [("head", 200.0)]


@pytest.fixture
def one_rank(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_sharded_parameters(one_rank):
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(net, mesh=one_rank)
    optimizer = AdamW(net.parameters())
    driver = TorchDriver({"model": net, "optimizer": optimizer}, ROLLS_BACK)
    for i in range(3):
        x = torch.full((1, 2), NAN if i == 2 else 1.0)
        net(x).sum().backward()
        assert not driver.may_save()
        optimizer.step()
        optimizer.zero_grad()
        assert driver.may_save()
        record = single_record(driver)
    assert {e.name for e in record.evidence} >= {"0.weight", "1.weight"}
