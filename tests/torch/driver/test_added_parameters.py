"""Parameters that are added while the run is under way."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW

from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import NAN, ROLLS_BACK, single_record
from tests.torch.optimizer_cases import host_and_device


class Growing:
    """A body under training, and a head that joins it later."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.optimizer = AdamW(self.body.parameters(), lr=0.01)
        self.state = {"body": self.body, "head": self.head, "optimizer": self.optimizer}
        self.driver = TorchDriver(self.state, ROLLS_BACK, attach={"engine": where})

    def backward(self) -> None:
        self.head(self.body(torch.ones(4, 3))).mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.head.zero_grad()
        self.backward()
        self.optimizer.step()


@host_and_device
def test_added_parameters_are_judged_named_and_skipped(where: str):
    run = Growing(where)
    for _ in range(6):
        run.step()
        single_record(run.driver)
    run.optimizer.add_param_group({"params": run.head.parameters(), "lr": 0.02})
    run.step()
    assert single_record(run.driver).cause == 0
    before = snapshot(run.optimizer)
    run.optimizer.zero_grad()
    run.backward()
    assert run.head.weight.grad is not None
    run.head.weight.grad.fill_(NAN)
    run.optimizer.step()
    record = single_record(run.driver)
    assert record.skip
    assert [each.name for each in record.evidence] == ["head.weight"]
    assert_same(snapshot(run.optimizer), before)
