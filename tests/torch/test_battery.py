"""Every optimizer of torch, on both engines: a skip is exact, other steps are unchanged."""

from __future__ import annotations

import pytest
import torch
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits, parameters, snapshot
from tests.torch.optimizer_cases import (
    CASES,
    FUSED,
    HOST_AND_DEVICE,
    NAN,
    Case,
    Where,
    host_and_device,
)

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_optimizer_of_torch_is_tested():
    theirs = {
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
    }
    assert theirs == {case.kind for case in CASES}


@host_and_device
@every_case
@pytest.mark.parametrize("policy", [policies.SKIPS, policies.CUTS], ids=["skips", "cuts"])
def test_a_neutral_decision_changes_no_bit(case: Case, where: Where, policy: Engine):
    """Nor does a policy that may cut the rate, until it does."""
    mine, twin = case.build(), case.build()
    heal = attach(mine, policy, engine=where)
    for i in range(6):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
    assert_same(snapshot(mine), snapshot(twin))


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
@pytest.mark.parametrize("policy", [policies.fixed(0.5), policies.CUTS], ids=["clips", "cuts"])
def test_both_engines_clip_and_cut_to_the_same_bits(case: Case, policy: Engine):
    runs = []
    for where in HOST_AND_DEVICE:
        optimizer = case.build()
        heal = attach(optimizer, policy, engine=where)  # type: ignore[arg-type]
        for i in range(6):
            case.step(optimizer, i, heal=heal, factor=NAN if i == 1 else 1.0)
        runs.append(snapshot(optimizer))
    assert_same(*runs)


@host_and_device
@every_case
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e5], ids=["nan", "inf", "spike"])
def test_a_skip_changes_no_bit_and_leaves_no_trace(case: Case, where: Where, factor: float):
    mine, twin = case.build(), case.build()
    heal = attach(mine, policies.SKIPS, engine=where)
    for i in range(6):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
    before = snapshot(mine)
    case.step(mine, 6, heal=heal, factor=factor)
    assert_same(before, snapshot(mine))
    decision = heal.last_decision()
    assert decision is not None
    assert decision.skip
    for i in range(7, 10):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
    assert_same(snapshot(mine), snapshot(twin))


@host_and_device
@every_case
def test_a_skipped_first_step_never_happened(case: Case, where: Where):
    mine, twin = case.build(), case.build()
    heal = attach(mine, policies.SKIPS, engine=where)
    case.step(mine, 0, heal=heal, factor=float("nan"))
    assert_same(snapshot(mine), snapshot(twin), "params", "groups")
    for i in range(1, 4):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
    assert_same(snapshot(mine), snapshot(twin))


@host_and_device
@every_case
def test_a_skip_keeps_the_gradients(case: Case, where: Where):
    optimizer = case.build()
    heal = attach(optimizer, policies.SKIPS, engine=where)
    seen = []
    case.step(
        optimizer,
        0,
        heal=heal,
        factor=float("nan"),
        then=lambda: seen.append([p.grad for p in parameters(optimizer)]),
    )
    after = [p.grad for p in parameters(optimizer)]
    assert all(a is b for a, b in zip(after, seen[-1], strict=True))
    for grad in after:
        assert grad is not None
        assert torch.isnan(grad.to_dense() if grad.is_sparse else grad).any()


@host_and_device
@every_case
def test_observe_mode_changes_nothing_even_for_nan(case: Case, where: Where):
    mine, twin = case.build(), case.build()
    heal = attach(mine, policies.OBSERVES, engine=where)
    for i in range(6):
        factor = float("nan") if i == 4 else 1.0
        case.step(mine, i, heal=heal, factor=factor)
        case.step(twin, i, factor=factor)
    assert_same(snapshot(mine), snapshot(twin))
    assert int(heal.metrics()["heal/skips"]) > 0


@host_and_device
@every_case
def test_nothing_is_left_on_the_optimizer_between_steps(case: Case, where: Where):
    optimizer = case.build()
    before, kind = set(vars(optimizer)), set(vars(type(optimizer)))
    groups = bits(snapshot(optimizer)["groups"])
    heal = attach(optimizer, policies.CUTS, engine=where)
    names = set(vars(optimizer))
    for i in range(4):
        case.step(optimizer, i, heal=heal, factor=float("nan") if i == 1 else 1.0)
        assert set(vars(optimizer)) == names
        assert bits(snapshot(optimizer)["groups"]) == groups
    heal.detach()
    assert set(vars(optimizer)) == before
    assert set(vars(type(optimizer))) == kind
    assert not optimizer._optimizer_step_pre_hooks
