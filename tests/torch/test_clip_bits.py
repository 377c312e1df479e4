"""A fixed clip has the bits of `torch.nn.utils.clip_grad_norm_`, which it replaces."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from healcore.runtime.healer import Healer
from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, parameters, snapshot
from tests.torch.optimizer_cases import CASES, Case, host_and_device
from tests.torch.test_grad_scaler import Loop, every_way
from tests.torch.test_norm_limit import limit

WITHOUT_CLOSURE = [case for case in CASES if not case.closure and not case.sparse]
STEPS = 12


@host_and_device
@pytest.mark.parametrize("case", WITHOUT_CLOSURE, ids=lambda case: case.name)
def test_every_optimizer_has_the_bits_of_clip_grad_norm(case: Case, where: Any):
    """Some steps are clipped, some are not, and some have a norm that is the limit."""
    mine, twin = case.build(), case.build()
    heal = attach(mine, policies.fixed(3.7), engine=where)

    def clip() -> None:
        clip_grad_norm_(parameters(twin), 3.7)

    for i in range(STEPS):
        factor = [1.0, 0.3, 30.0, 0.01][i % 4]
        case.step(mine, i, heal=heal, factor=factor)
        case.step(twin, i, factor=factor, then=clip)
        assert_same(snapshot(mine), snapshot(twin))
    assert 0 < int(heal.metrics()["heal/clips"]) < STEPS


@every_way
def test_a_grad_scaler_changes_no_bits_of_a_clip(fused: bool, where: Any, unscale: bool):
    mine, twin = Loop(fused=fused), Loop(fused=fused)
    heal = attach(mine.optimizer, policies.fixed(0.3), engine=where, scaler=mine.scaler)
    for i in range(STEPS):
        factor = 1 + i / 7
        overflow = float("inf") if i == 5 else 0.0
        mine.step(factor=factor, overflow=overflow, unscale=unscale, heal=heal)
        twin.step(factor=factor, overflow=overflow, unscale=True, clip=0.3)
        assert_same(snapshot(mine.optimizer), snapshot(twin.optimizer))
    assert mine.scaler.state_dict() == twin.scaler.state_dict()


def random_gradients(params: list[Parameter], random: torch.Generator, scale: float) -> None:
    for p in params:
        p.grad = (torch.randn(p.shape, generator=random) * scale).to(p.dtype)


DTYPES = {
    "float32": [torch.float32],
    "float64": [torch.float64],
    "bfloat16": [torch.bfloat16],
    "mixed": [torch.bfloat16, torch.float32, torch.float64],
}


@host_and_device
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
def test_every_dtype_has_the_bits_of_clip_grad_norm(dtypes: list[torch.dtype], where: Any):
    """Torch computes the norm in the dtype of the gradients: half precision has three digits."""
    random = torch.Generator().manual_seed(0)
    shapes = [(7, 5), (40_000,), (5,), (3, 3)]
    params = [Parameter(torch.ones(s, dtype=dtypes[i % len(dtypes)])) for i, s in enumerate(shapes)]
    twins = copy.deepcopy(params)
    mine, twin = SGD(params, lr=0.1), SGD(twins, lr=0.1)
    heal = attach(mine, policies.fixed(0.1), engine=where)
    for i in range(40):
        # From clipped norms to norms around the limit, where half precision rounds to it.
        random_gradients(params, random, 0.1 if i % 2 else 0.1 / 40_050**0.5)
        for p, q in zip(params, twins, strict=True):
            assert p.grad is not None
            q.grad = p.grad.clone()
        mine.step()
        clip_grad_norm_(twins, 0.1)
        twin.step()
        assert_same(snapshot(mine), snapshot(twin))
    assert int(heal.metrics()["heal/clips"]) >= 20


@host_and_device
def test_a_half_precision_norm_that_overflows_is_clipped_in_float32(where: Any):
    """Torch's own clip multiplies by 1 / inf here, and the step is lost."""
    p = Parameter(torch.zeros(4, dtype=torch.float16))
    heal = attach(SGD([p], lr=1.0), policies.fixed(1.0), engine=where)
    p.grad = torch.full((4,), 60_000.0, dtype=torch.float16)
    heal.optimizer.step()
    torch.testing.assert_close(p.detach().float(), torch.full((4,), -0.5), rtol=1e-3, atol=0)


def test_a_healer_sums_the_norms_in_the_order_of_the_model(tmp_path: Any):
    """Programs give biases and norms a group of their own, and clip `model.parameters()`."""
    torch.manual_seed(0)
    sizes = [(6, 7), (7, 3), (3, 9), (9, 1)]
    model = nn.Sequential(*(nn.Linear(i, j) for i, j in sizes))
    twin_model = copy.deepcopy(model)

    def optimizer_of(model: nn.Module) -> AdamW:
        groups = [[p for p in model.parameters() if (p.dim() > 1) == big] for big in (False, True)]
        return AdamW([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}])

    mine, twin = optimizer_of(model), optimizer_of(twin_model)
    state = {"model": model, "optimizer": mine}
    with Healer("default", state=state, store=tmp_path, clip={"max_norm": 0.1}) as healer:
        for _ in healer.steps(60):
            batch = torch.randn(8, 6)
            for m, o in ((model, mine), (twin_model, twin)):
                o.zero_grad()
                loss = (m(batch) - 3).square().mean()
                if m is model:
                    healer.observe(loss)
                loss.backward()
                if m is twin_model:
                    clip_grad_norm_(m.parameters(), 0.1)
                o.step()
            assert_same(snapshot(mine), snapshot(twin))


@host_and_device
def test_a_limit_of_a_rollback_applies_beside_the_clip(where: Any):
    """The lower of both limits is in force, and its release restores the bits of the clip."""
    case = Case("", SGD)
    mine, twin = case.build(), case.build()
    heal = attach(mine, policies.fixed(3.0), engine=where)
    for i in range(6):
        if i == 2:
            limit(heal, 0.5)
        if i == 4:
            limit(heal, 0.0)
            twin = copy.deepcopy(mine)
        clip_to = 0.5 if i in (2, 3) else 3.0
        case.step(mine, i, heal=heal, factor=10.0)
        clip = partial(clip_grad_norm_, parameters(twin), clip_to)
        case.step(twin, i, factor=10.0, then=clip)
        if i in (2, 3):
            for a, b in zip(parameters(mine), parameters(twin), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        else:
            assert_same(snapshot(mine), snapshot(twin), "params")


@pytest.mark.parametrize("engine", ["host", "device"])
def test_sparse_gradients_are_clipped_by_the_own_norm(engine: Any):
    """Torch's clip raises for them."""
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = SGD(embedding.parameters(), lr=1.0)
    heal = attach(optimizer, policies.fixed(0.5), engine=engine)
    before = embedding.weight.detach().clone()
    (embedding(torch.tensor([1, 2])) * 10).sum().backward()
    optimizer.step()
    moved = float((embedding.weight.detach() - before).norm())
    assert moved == pytest.approx(0.5, rel=1e-5)
    assert int(heal.metrics()["heal/clips"]) == 1
