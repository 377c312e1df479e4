"""The ways in which a step is called: closures, subclasses, exceptions, no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, AdamW

from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits, parameters, snapshot
from tests.torch.optimizer_cases import NAN, Case, Where, host_and_device


def steps(heal: Any) -> int:
    return int(heal.metrics()["heal/steps"])


# -- closures ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("where", "line_search", "bad_call"), [("host", None, 2), ("device", "strong_wolfe", 3)]
)
def test_lbfgs_that_reaches_a_nan_is_undone(where: Where, line_search: str | None, bad_call: int):
    case = Case("", LBFGS, {"max_iter": 5, "line_search_fn": line_search}, closure=True)
    optimizer = case.build()
    attach(optimizer, policies.SKIPS, engine=where)
    case.step(optimizer, 0)
    case.step(optimizer, 1)
    before = snapshot(optimizer)
    calls = 0

    def poison() -> None:
        nonlocal calls
        calls += 1
        if calls >= bad_call:
            for p in parameters(optimizer):
                p.grad = torch.full_like(p, NAN)

    case.step(optimizer, 2, then=poison)
    assert calls >= bad_call
    assert_same(before, snapshot(optimizer))
    case.step(optimizer, 3)
    assert before["params"] != snapshot(optimizer)["params"]
    assert all(bool(torch.isfinite(p).all()) for p in parameters(optimizer))


# -- subclasses ----------------------------------------------------------------------------------


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
    assert "Decaying has a step() of its own" in heal.report().skip_reason
    before = snapshot(optimizer)
    case.step(optimizer, 0, heal=heal, factor=NAN)
    assert_same(before, snapshot(optimizer), "params")


# -- exceptions ----------------------------------------------------------------------------------


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


# -- gradients that are not there ----------------------------------------------------------------


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
