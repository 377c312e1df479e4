"""Parameters that are added, frozen or thawed while the run is under way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from healcore.runtime.store import StateMismatch
from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import NAN, ROLLS_BACK, single_record
from tests.torch.optimizer_cases import host_and_device


class Growing:
    """A body under training, and a head that joins it later."""

    def __init__(
        self, policy: Any = ROLLS_BACK, where: str = "host", optimizer: Any = AdamW
    ) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.optimizer = optimizer(self.body.parameters(), lr=0.01)
        self.state = {"body": self.body, "head": self.head, "optimizer": self.optimizer}
        self.driver = TorchDriver(self.state, policy, attach={"engine": where})

    def backward(self, factor: float = 1.0) -> None:
        (self.head(self.body(torch.ones(4, 3))).mean() * factor).backward()

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.head.zero_grad()
        self.backward(factor)
        self.optimizer.step()

    def grow(self) -> None:
        self.optimizer.add_param_group({"params": self.head.parameters(), "lr": 0.02})


@host_and_device
def test_added_parameters_are_judged_named_and_skipped(where: str):
    run = Growing(where=where)
    for _ in range(6):
        run.step()
        single_record(run.driver)
    run.grow()
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


def test_an_earlier_checkpoint_does_not_fit_and_changes_nothing():
    run = Growing(optimizer=SGD)
    store = run.driver.store(None, ())
    run.step()
    store.save(1, run.driver.items(), healing=run.driver.healing())
    run.grow()
    run.step()
    before = snapshot(run.optimizer)
    said = r"optimizer\[head.bias\] is missing in the saved state"
    with pytest.raises(StateMismatch, match=said):
        run.driver.replace(store.restore(1, run.driver.items()).state)
    assert_same(snapshot(run.optimizer), before)
    store.save(2, run.driver.items(), healing=run.driver.healing())
    after = snapshot(run.optimizer)
    run.step()
    run.driver.replace(store.restore(2, run.driver.items()).state)
    assert_same(snapshot(run.optimizer), after)
