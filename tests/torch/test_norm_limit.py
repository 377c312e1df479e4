"""A limit of the gradient norm, which a rollback sets in the engine's state, reaches every step."""

import copy
import math
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from healcore.core.engine import Engine
from healcore.runtime.run.engine_states import limit_norms
from healcore.torch import Healing, attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, parameters, snapshot
from tests.torch.optimizer_cases import CASES, FUSED, HOST_AND_DEVICE, Case, host_and_device
from tests.torch.test_grad_scaler import Loop, every_way

LIMIT, LARGE = 0.5, 4096.0
POLICY = Engine(policies.CUTS.config)
"""Does not clip, and skips only NaN and Inf."""
WITHOUT_CLOSURE = [case for case in CASES if not case.closure and not case.sparse]


def limit(heal: Healing, norm: float) -> None:
    """Sets the limit as a rollback does; 0 releases it."""
    engine = heal.live_engine.engine
    limited = limit_norms(engine, {"optimizer": heal.state_dict()}, {"optimizer": norm})
    heal.load_state_dict(limited["optimizer"])


@host_and_device
@pytest.mark.parametrize("case", WITHOUT_CLOSURE, ids=lambda case: case.name)
def test_a_large_gradient_is_clipped_as_by_clip_grad_norm(case: Case, where: Any):
    mine, reference = case.build(), case.build()
    heal = attach(mine, POLICY, engine=where)
    for i in range(5):
        if i == 2:
            limit(heal, LIMIT)
        factor = LARGE if i == 3 else 1.0
        case.step(mine, i, heal=heal, factor=factor)
        params = parameters(reference)

        def clip(params: Any = params) -> None:
            clip_grad_norm_(params, LIMIT)

        case.step(reference, i, factor=factor, then=clip if i >= 2 else None)
    assert int(heal.metrics()["heal/clips"]) == 3
    if not case.fused:
        assert_same(snapshot(mine), snapshot(reference))
        return
    # The kernel divides by 1 / scale in place of multiplying: an ulp or two.
    for a, b in zip(parameters(mine), parameters(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@host_and_device
@pytest.mark.parametrize("case", WITHOUT_CLOSURE, ids=lambda case: case.name)
def test_without_a_limit_no_bit_changes_also_after_its_release(case: Case, where: Any):
    mine, twin = case.build(), case.build()
    heal = attach(mine, POLICY, engine=where)
    for i in range(6):
        if i == 3:  # a step with a limit that changes its gradient: the twin has to clip too
            limit(heal, LIMIT)
        if i == 4:
            limit(heal, 0.0)
            twin = case.build()
            with torch.no_grad():
                for p, value in zip(parameters(twin), parameters(mine), strict=True):
                    p.copy_(value)
            twin.load_state_dict(copy.deepcopy(mine.state_dict()))
        case.step(mine, i, heal=heal)
        if i != 3:
            assert float(heal.metrics()["heal/grad_scale"]) == 1.0
            case.step(twin, i)
            assert_same(snapshot(mine), snapshot(twin))
    assert int(heal.metrics()["heal/clips"]) == 1


@pytest.mark.parametrize("case", FUSED, ids=lambda case: case.name)
def test_both_engines_limit_to_the_same_bits(case: Case):
    runs = []
    for where in HOST_AND_DEVICE:
        optimizer = case.build()
        heal = attach(optimizer, POLICY, engine=where)  # type: ignore[arg-type]
        for i in range(6):
            if i == 2:
                limit(heal, LIMIT)
            case.step(optimizer, i, heal=heal, factor=LARGE if i == 3 else 1.0)
        runs.append((snapshot(optimizer), heal.state_dict()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_the_fused_kernel_divides_only_while_a_limit_is_in_force():
    """CUDA's SGD with momentum rounds differently if it divides, even by 1."""
    case = Case("", SGD, {"fused": True, "momentum": 0.9})
    optimizer = case.build()
    heal = attach(optimizer, POLICY, engine="device")
    divides = []
    optimizer.register_step_pre_hook(lambda *_: divides.append("grad_scale" in vars(optimizer)))
    case.step(optimizer, 0, heal=heal)  # creates the momentum buffers, by an order on the host
    for i, norm in enumerate([0.0, 1e6, 0.0]):
        limit(heal, norm)
        case.step(optimizer, i, heal=heal)
    assert divides == [False, False, True, False]


@every_way
def test_under_a_grad_scaler_the_limit_is_of_the_unscaled_norm(
    fused: bool, where: Any, unscale: bool
):
    mine, twin = Loop(SGD, fused=fused), Loop(SGD, fused=fused)
    heal = attach(mine.optimizer, POLICY, engine=where, scaler=mine.scaler)
    for i in range(5):
        if i == 2:
            limit(heal, LIMIT)
        factor = LARGE if i == 3 else 1.0
        mine.step(factor=factor, unscale=unscale, heal=heal)
        twin.step(factor=factor, unscale=True, clip=LIMIT if i >= 2 else 0.0)
    torch.testing.assert_close(mine.p, twin.p, rtol=1e-6, atol=0)
    assert mine.scaler.state_dict() == twin.scaler.state_dict()
    before = snapshot(mine.optimizer)
    mine.step(overflow=math.inf, unscale=unscale, heal=heal)
    assert_same(before, snapshot(mine.optimizer))


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_the_norm_of_accumulated_gradients_is_limited(where: Any, fused: bool):
    """Their sum is one gradient; no micro-batch is limited by itself."""
    p = Parameter(torch.zeros(4))
    optimizer = SGD([p], lr=1.0, fused=fused)
    heal = attach(optimizer, POLICY, engine=where)
    limit(heal, LIMIT)
    for target in (torch.tensor([3.0, 0, 0, 0]), torch.tensor([0, 4.0, 0, 0])):
        loss = (p * target).sum()
        heal.observe(loss)
        loss.backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.tensor([-0.3, -0.4, 0, 0]))


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_per_tensor_factors_are_at_most_that_of_the_limit(where: Any, fused: bool):
    a, b = (Parameter(torch.zeros(4)) for _ in range(2))
    optimizer = SGD([a, b], lr=1.0, fused=fused)
    heal = attach(optimizer, policies.ADAGC, engine=where)
    for last in (*[False] * (policies.WARMUP + 1), True):
        if last:
            limit(heal, 0.5)
        before = a.detach().clone(), b.detach().clone()
        a.grad, b.grad = torch.full((4,), 150.0 if last else 1.5), torch.full((4,), 2.0)
        optimizer.step()
    decision: Any = heal.last_decision()
    factor = 0.5 / math.hypot(300, 4)  # less than the 0.0104 of the policy for the first tensor
    assert decision.group_scale == pytest.approx([factor, factor])
    assert decision.grad_scale == 1.0
    torch.testing.assert_close(before[0] - a, torch.full((4,), 150 * factor))
    torch.testing.assert_close(before[1] - b, torch.full((4,), 2 * factor))


@host_and_device
def test_a_norm_above_the_limit_of_signals_is_scaled_by_itself(where: Any):
    """Detectors see such a norm as 1e15, and a factor for that would leave a norm of 5,000."""
    p = Parameter(torch.zeros(2))
    optimizer = SGD([p], lr=1.0, fused=True)
    heal = attach(optimizer, POLICY, engine=where)
    limit(heal, 1.0)
    for grad, step in (([3e18, 4e18], [0.6, 0.8]), ([3.0, 4.0], [0.6, 0.8])):
        before = p.detach().clone()
        p.grad = torch.tensor(grad)
        optimizer.step()
        torch.testing.assert_close(before - p, torch.tensor(step))


@host_and_device
def test_observe_mode_only_says_what_it_would_have_done(where: Any):
    engine = Engine(POLICY.config._replace(mode="observe"))
    p = Parameter(torch.zeros(2))
    optimizer = SGD([p], lr=1.0)
    heal = attach(optimizer, engine, engine=where)
    limit(heal, 1.0)
    p.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert p.tolist() == [-3.0, -4.0]
    assert float(heal.metrics()["heal/grad_scale"]) == pytest.approx(0.2)


def test_a_closure_that_a_fused_step_evaluates_again_leaves_no_scale_behind():
    """A hook of the program writes gradients, so the closure is evaluated and clipped again."""
    p: Any = Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.AdamW([p], lr=0.1, fused=True)
    heal = attach(optimizer, POLICY, engine="host")
    limit(heal, LIMIT)
    evaluations = []

    def write(*_: Any) -> None:
        p.grad.mul_(1.0)

    def closure() -> torch.Tensor:
        evaluations.append(1)
        optimizer.zero_grad()
        loss = 0.5 * (p**2).sum()
        loss.backward()
        return loss

    optimizer.register_step_pre_hook(write)
    optimizer.step(closure)
    assert len(evaluations) == 2
    # A scale that stays divides the gradients of every later step, and a GradScaler takes it.
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    moment = optimizer.state[p]["exp_avg"]
    torch.testing.assert_close(moment.norm() / 0.1, torch.tensor(LIMIT), rtol=1e-4, atol=0)
