"""The ways in which a step is called: closures, subclasses, schedulers, copies, exceptions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits, parameters, snapshot
from tests.torch.optimizer_cases import NAN, Case, Where, host_and_device


def steps(heal: Any) -> int:
    return int(heal.metrics()["heal/steps"])


@host_and_device
def test_a_closures_own_gradients_are_judged(where: Where):
    p = Parameter(torch.ones(3))
    optimizer = AdamW([p], fused=True)
    heal = attach(optimizer, policies.SKIPS, engine=where)
    p.grad = torch.full((3,), NAN)  # of an older backward: not this step's

    def closure() -> torch.Tensor:
        p.grad = torch.ones(3)
        return p.sum() * 2

    loss: Any = optimizer.step(closure)
    assert loss.item() == 6.0
    metrics = heal.metrics()
    assert int(metrics["heal/skips"]) == 0
    assert float(metrics["heal/grad_norm"]) == pytest.approx(3**0.5)
    assert float(metrics["heal/loss"]) == 6.0  # what the closure returned


class Decaying(AdamW):
    """Adds arithmetic of its own, which no flag can stop."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.mul_(0.9)
        return super().step(closure)


@host_and_device
def test_a_step_with_its_own_arithmetic_is_skipped_too(where: Where):
    case = Case("", Decaying, {"fused": True})
    optimizer = case.build()
    heal = attach(optimizer, policies.SKIPS, engine=where)
    assert heal.report().skip == "not run"
    assert "Decaying has a step() of its own" in heal.report().engine_reason
    before = snapshot(optimizer)
    case.step(optimizer, 0, heal=heal, factor=NAN)
    assert_same(before, snapshot(optimizer), "params")


@pytest.mark.parametrize("case", [Case("", SGD), Case("", AdamW, {"fused": True})], ids=str)
def test_schedulers_made_before_and_after_attach(case: Case, recwarn: pytest.WarningsRecorder):
    mine, twin = case.build(), case.build()
    schedulers = [ExponentialLR(mine, 0.9), ExponentialLR(twin, 0.9)]
    heal = attach(mine, policies.SKIPS)
    schedulers += [StepLR(mine, 2), StepLR(twin, 2)]
    for i in range(6):
        case.step(mine, i, heal=heal, factor=NAN if i == 0 else 1.0)
        if i:
            case.step(twin, i)
        else:
            twin._opt_called = True  # type: ignore[attr-defined]
        for each in schedulers:
            each.step()
    assert not recwarn.list
    assert_same(snapshot(mine), snapshot(twin))
    assert int(heal.metrics()["heal/skips"]) == 1
    heal.detach()
    case.step(mine, 0, factor=NAN)
    assert bool(torch.isnan(parameters(mine)[0]).any()), "the last scheduler keeps a free step"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_is_free_of_the_policy(copied: Any):
    optimizer = SGD([Parameter(torch.ones(3))], lr=0.5)
    heal = attach(optimizer, policies.SKIPS)
    other = copied(optimizer)
    (p,) = parameters(other)
    p.grad = torch.full((3,), NAN)
    other.step()
    assert bool(torch.isnan(p).all())
    assert steps(heal) == 0


def test_a_step_stored_before_attach_runs_as_without_healcore(caplog: pytest.LogCaptureFixture):
    optimizer, twin = (SGD([Parameter(torch.ones(3))], lr=0.5, momentum=0.9) for _ in range(2))
    stored = optimizer.step
    heal = attach(optimizer, policies.SKIPS)
    for call in (stored, stored, optimizer.step):
        for each in (optimizer, twin):
            parameters(each)[0].grad = torch.ones(3)
        heal.observe(1.0 if call is stored else 2.0)
        call()
        twin.step()
    assert_same(snapshot(optimizer), snapshot(twin))
    assert [each.message.count("not judged") for each in caplog.records] == [1]
    assert steps(heal) == 1
    assert float(heal.metrics()["heal/loss"]) == 2.0, "without the losses of steps not judged"


def fail(*_: Any) -> None:
    raise RuntimeError("out of memory")


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_raises_does_not_end_healing(where: Where, fused: bool):
    p = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.5, fused=fused)
    own = optimizer.param_groups[0]["lr"]
    heal = attach(optimizer, policies.CUTS, engine=where)
    p.grad = torch.full((3,), NAN)
    optimizer.step()  # cuts the rate, so that it is replaced in the next step
    failing = optimizer.register_step_pre_hook(fail)  # after ours
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    failing.remove()
    p.grad = torch.full((3,), NAN)
    before = bits(p)
    optimizer.step()
    assert bits(p) == before
    assert steps(heal) == 3
    assert optimizer.param_groups[0]["lr"] is own
    assert p.grad is not None
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))


@host_and_device
def test_a_step_without_gradients_is_a_no_op(where: Where):
    optimizer = AdamW([Parameter(torch.ones(3))], fused=True)
    heal = attach(optimizer, policies.EVERYTHING, engine=where)
    before, state = snapshot(optimizer), heal.state_dict()
    heal.observe(1.0)
    optimizer.step()
    assert_same(before, snapshot(optimizer))
    assert heal.state_dict() == state
    assert heal.decision is None
    heal.observe(2.0)  # the first loss was that step's
    parameters(optimizer)[0].grad = torch.ones(3)
    optimizer.step()
    assert float(heal.metrics()["heal/loss"]) == 2.0
