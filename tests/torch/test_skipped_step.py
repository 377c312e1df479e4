"""Third-party optimizers: a skipped step leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits
from tests.torch.optimizer_cases import NAN
from tests.torch.third_party_optimizers import SCHEDULE_FREE, Run, names

every = pytest.mark.parametrize("name", names())


def test_all_of_schedulefree_is_tested():
    schedulefree = pytest.importorskip("schedulefree")
    theirs = {
        name
        for name, each in vars(schedulefree).items()
        if isinstance(each, type) and issubclass(each, Optimizer)
    }
    assert theirs == set(SCHEDULE_FREE)


@every
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
def test_a_skip_leaves_no_trace(name: str, closure: bool):
    mine, twin = Run(name, closure=closure), Run(name, closure=closure)
    heal = attach(mine.optimizer, policies.SKIPS)
    skipped = (0, 4)
    for i in range(8):
        if i in skipped:
            before = mine.view()
            mine.step(i, heal, factor=NAN)
            assert_same(before, mine.view(), *(() if i else ("params", "groups")))
        else:
            mine.step(i, heal)
            twin.step(i)
    assert int(heal.metrics()["heal/skips"]) == len(skipped)
    assert_same(mine.view(), twin.view())


# -- how such a step is called ---------------------------------------------------------------------


class Counting(Optimizer):
    """Gradient descent with a counter, a buffer and random draws; raises without gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls, self.log = 0, []
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            if all(p.grad is None for p in group["params"]):
                raise ValueError("no gradients")
            for p in group["params"]:
                self.log.append(float(torch.rand(())))
                p.mul_(0.9)
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
        return loss


def take(optimizer: Optimizer, value: float, call: Any = None) -> Any:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, value)
    return (call or optimizer.step)()


def seen(optimizer: Any) -> Any:
    counts = {"calls": optimizer.calls, "log": optimizer.log}
    groups = [
        {k: v for k, v in g.items() if k not in ("params", "lr")} for g in optimizer.param_groups
    ]
    params = [bits(p) for g in optimizer.param_groups for p in g["params"]]
    return bits([counts, groups]), params, bits(torch.get_rng_state())


def built() -> Counting:
    return Counting([Parameter(torch.ones(3)), Parameter(torch.ones(2, 2))])


def test_the_step_is_not_run_at_all():
    optimizer = built()
    attach(optimizer, policies.SKIPS)
    take(optimizer, 1.0)
    before = seen(optimizer)
    assert take(optimizer, NAN) is None
    assert seen(optimizer) == before
    take(optimizer, 1.0)
    assert optimizer.calls == 2


def test_a_closure_that_finds_a_nan_ends_the_step():
    optimizer = built()
    attach(optimizer, policies.SKIPS)

    def closure() -> float:
        return take(optimizer, NAN, lambda: 7.5)

    p = optimizer.param_groups[0]["params"][0]
    before = seen(optimizer)[1:]
    assert optimizer.step(closure) == 7.5
    assert seen(optimizer)[1:] == before
    assert optimizer.calls == 0
    assert optimizer.param_groups[0]["step"] == 0
    assert torch.isnan(p.grad).all()  # where the loop may want to see it


@pytest.mark.parametrize("order", ["scheduler first", "attach first"])
def test_a_schedule_goes_on_over_a_skip(order: str):
    optimizer = built()
    if order == "attach first":
        attach(optimizer, policies.SKIPS)
    scheduler = ExponentialLR(optimizer, 0.5)
    if order == "scheduler first":
        attach(optimizer, policies.SKIPS)
    before = seen(optimizer)
    take(optimizer, NAN)
    scheduler.step()
    assert seen(optimizer) == before
    assert optimizer.param_groups[0]["lr"] == 0.05
