"""Clipping gives the bits of `clip_grad_norm_`, in the kernel and in place."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, parameters, snapshot
from tests.torch.optimizer_cases import CASES, Case, Where, host_and_device

MAX_NORM = 0.5


def clipped_run(case: Case, steps: int) -> torch.optim.Optimizer:
    """The loop that people write without healcore."""
    optimizer = case.build()

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters(optimizer), MAX_NORM)

    for i in range(steps):
        case.step(optimizer, i, then=clip)
    return optimizer


@host_and_device
@pytest.mark.parametrize(
    "case", [c for c in CASES if not c.sparse and not c.closure], ids=lambda case: case.name
)
def test_clip_is_that_of_clip_grad_norm(case: Case, where: Where):
    reference = clipped_run(case, 5)
    mine = case.build()
    heal = attach(mine, policies.fixed(MAX_NORM), engine=where)
    for i in range(5):
        case.step(mine, i, heal=heal)
    assert int(heal.metrics()["heal/clips"]) == 5
    if case.fused:  # divides by 1 / scale in place of multiplying: an ulp or two
        for a, b in zip(parameters(mine), parameters(reference), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)
    else:
        assert_same(snapshot(mine), snapshot(reference))


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_adagc_clips_each_tensor_by_its_own_history(where: Where, fused: bool):
    a, b, idle = (Parameter(torch.ones(4)) for _ in range(3))
    optimizer = torch.optim.SGD([a, idle, b], lr=1.0, fused=fused)
    heal = attach(optimizer, policies.ADAGC, engine=where)
    for _ in range(policies.WARMUP + 1):
        a.grad, b.grad = torch.full((4,), 0.5), torch.full((4,), 2.0)  # norms 1 and 4
        optimizer.step()
    before = a.detach().clone(), b.detach().clone()
    a.grad, b.grad = torch.full((4,), 5.0), torch.full((4,), 2.0)  # norms 10 and 4
    optimizer.step()
    torch.testing.assert_close(before[0] - a, torch.full((4,), 0.52))  # ratio 1.04 times 1
    torch.testing.assert_close(before[1] - b, torch.full((4,), 2.0))
    decision = heal.last_decision()
    assert decision is not None
    assert decision.group_scale == pytest.approx([0.104, 1.0, 1.0], abs=1e-6)


@host_and_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_and_several_groups(where: Where, dtype: torch.dtype):
    half, full = Parameter(torch.zeros(100, dtype=dtype)), Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([{"params": [half]}, {"params": [full], "lr": 0.5}], lr=1.0)
    heal = attach(optimizer, policies.fixed(1.0), engine=where)
    half.grad, full.grad = torch.full_like(half, 0.3), torch.full_like(full, 0.4)
    optimizer.step()
    assert float(heal.metrics()["heal/grad_norm"]) == pytest.approx(5.0, rel=1e-3)
    assert float(half.detach()[0]) == pytest.approx(-0.06, rel=1e-2)
    assert float(full.detach()[0]) == pytest.approx(-0.04, rel=1e-3)
