"""Every optimizer of torch, on both engines: skips are exact, other steps are unchanged."""

from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Adagrad, Optimizer

from healcore.core.engine import Engine
from healcore.torch import attach
from healcore.torch.moments import reset_moments
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits, parameters, snapshot
from tests.torch.optimizer_cases import CASES, FUSED, HOST_AND_DEVICE, NAN, Case, host_and_device
from tests.torch.sync_counter import CountSyncs
from tests.torch.third_party_optimizers import OptimizerRun, names

MAX_NORM = 0.5
WITHOUT_CLOSURE = [case for case in CASES if not case.closure and not case.sparse]
HALF = {"initial_accumulator_value": 0.5, "lr_decay": 0.1}


def cases(chosen: list[Case]) -> Any:
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case.name)


def test_every_optimizer_of_torch_is_tested():
    theirs = {
        each
        for each in vars(torch.optim).values()
        if isinstance(each, type) and issubclass(each, Optimizer) and each is not Optimizer
    }
    assert theirs == {case.kind for case in CASES}


# -- steps that are taken ------------------------------------------------------------------------


@host_and_device
@cases(CASES)
@pytest.mark.parametrize(
    ("policy", "factor"),
    [(policies.CUTS, 1.0), (policies.OBSERVES, NAN)],
    ids=["cuts", "observes NaN"],
)
def test_a_neutral_decision_changes_no_bit(case: Case, where: Any, policy: Engine, factor: float):
    """Nor does a policy that may cut the rate, until it does, nor observe mode."""
    mine, twin = case.build(), case.build()
    heal = attach(mine, policy, engine=where)
    for i in range(6):
        case.step(mine, i, heal=heal, factor=factor if i == 4 else 1.0)
        case.step(twin, i, factor=factor if i == 4 else 1.0)
    assert_same(snapshot(mine), snapshot(twin))
    assert (int(heal.metrics()["heal/skips"]) > 0) == (policy is policies.OBSERVES)


@host_and_device
@cases(WITHOUT_CLOSURE)
def test_clip_is_that_of_clip_grad_norm(case: Case, where: Any):
    mine, reference = case.build(), case.build()
    heal = attach(mine, policies.fixed(MAX_NORM), engine=where)
    for i in range(5):
        case.step(mine, i, heal=heal)
        params = parameters(reference)

        def clip(params: Any = params) -> None:
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)

        case.step(reference, i, then=clip)
    assert int(heal.metrics()["heal/clips"]) == 5
    if not case.fused:
        assert_same(snapshot(mine), snapshot(reference))
        return
    # The kernel divides by 1 / scale in place of multiplying: an ulp or two.
    for a, b in zip(parameters(mine), parameters(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=1e-7)


@cases(FUSED)
@pytest.mark.parametrize("policy", [policies.fixed(MAX_NORM), policies.CUTS], ids=["clips", "cuts"])
def test_both_engines_clip_and_cut_to_the_same_bits(case: Case, policy: Engine):
    runs = []
    for where in HOST_AND_DEVICE:
        optimizer = case.build()
        heal = attach(optimizer, policy, engine=where)  # type: ignore[arg-type]
        for i in range(6):
            case.step(optimizer, i, heal=heal, factor=NAN if i == 1 else 1.0)
        runs.append(snapshot(optimizer))
    assert_same(*runs)
    assert_same(runs[0], snapshot(case.build()), "groups")  # the rate is put back


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_adagc_clips_each_tensor_by_its_own_history(where: Any, fused: bool):
    a, b, idle = (Parameter(torch.ones(4)) for _ in range(3))
    optimizer = torch.optim.SGD([a, idle, b], lr=1.0, fused=fused)
    heal = attach(optimizer, policies.ADAGC, engine=where)
    for last in (*[False] * (policies.WARMUP + 1), True):
        before = a.detach().clone(), b.detach().clone()
        # Norms 1 and 4, and in the last step 10 and 4.
        a.grad, b.grad = torch.full((4,), 5.0 if last else 0.5), torch.full((4,), 2.0)
        optimizer.step()
    torch.testing.assert_close(before[0] - a, torch.full((4,), 0.52))  # ratio 1.04 times 1
    torch.testing.assert_close(before[1] - b, torch.full((4,), 2.0))
    decision: Any = heal.last_decision()
    assert decision.group_scale == pytest.approx([0.104, 1.0, 1.0], abs=1e-6)


@host_and_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes_and_several_groups_are_clipped(where: Any, dtype: torch.dtype):
    half, full = Parameter(torch.zeros(100, dtype=dtype)), Parameter(torch.zeros(100))
    optimizer = torch.optim.SGD([{"params": [half]}, {"params": [full], "lr": 0.5}], lr=1.0)
    heal = attach(optimizer, policies.fixed(1.0), engine=where)
    half.grad, full.grad = torch.full_like(half, 0.3), torch.full_like(full, 0.4)
    optimizer.step()
    assert float(heal.metrics()["heal/grad_norm"]) == pytest.approx(5.0, rel=1e-3)
    assert float(half.detach()[0]) == pytest.approx(-0.06, rel=1e-2)
    assert float(full.detach()[0]) == pytest.approx(-0.04, rel=1e-3)


# -- skips ---------------------------------------------------------------------------------------


@host_and_device
@cases(CASES)
@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(NAN, id="nan"),
        pytest.param(float("inf"), id="inf", marks=pytest.mark.slow),
        pytest.param(1e5, id="spike"),
    ],
)
def test_a_skip_changes_no_bit_and_leaves_no_trace(case: Case, where: Any, factor: float):
    """The gradients stay too, and the optimizer object. The first step is skipped as well."""
    mine, twin = case.build(), case.build()
    own, kind = set(vars(mine)), set(vars(type(mine)))
    heal = attach(mine, policies.SKIPS, engine=where)
    case.step(mine, 0, heal=heal, factor=NAN)
    assert_same(snapshot(mine), snapshot(twin), "params", "groups")
    for i in range(1, 7):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
    before = snapshot(mine)
    grads = []
    attached = set(vars(mine))
    assert_same(before, snapshot(twin))

    def read() -> None:
        grads.append([p.grad for p in parameters(mine)])

    case.step(mine, 7, heal=heal, factor=factor, then=read)
    assert_same(before, snapshot(mine))
    assert all(p.grad is grad for p, grad in zip(parameters(mine), grads[-1], strict=True))
    finite = [torch.isfinite(g.to_dense() if g.is_sparse else g).all() for g in grads[-1]]
    assert all(finite) == (factor == 1e5)
    decision: Any = heal.last_decision()
    assert decision.skip
    for i in range(8, 11):
        case.step(mine, i, heal=heal)
        case.step(twin, i)
        assert set(vars(mine)) == attached
    assert_same(snapshot(mine), snapshot(twin))
    heal.detach()
    assert (set(vars(mine)), set(vars(type(mine)))) == (own, kind)
    assert not mine._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    "name",  # `make test` has every fourth optimizer
    [
        pytest.param(name, marks=pytest.mark.slow if number % 4 else ())
        for number, name in enumerate(names())
    ],
)
@pytest.mark.parametrize(
    "closure", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "closure"]
)
def test_a_skip_of_other_packages_leaves_no_trace(name: str, closure: bool):
    mine, twin = OptimizerRun(name, closure=closure), OptimizerRun(name, closure=closure)
    heal = attach(mine.optimizer, policies.SKIPS)
    skipped = (0, 3)
    for i in range(6):
        if i in skipped:
            before = mine.view()
            mine.step(i, heal, factor=NAN)
            assert_same(before, mine.view(), *(() if i else ("params",)))
        else:
            mine.step(i, heal)
            twin.step(i)
    assert int(heal.metrics()["heal/skips"]) == len(skipped)
    assert_same(mine.view(), twin.view())


# -- how often the host waits for the device -----------------------------------------------------


@host_and_device
@pytest.mark.parametrize(
    ("case", "policy"),
    [
        pytest.param(
            case,
            policy,
            id=f"{case.name}-{policy}",
            # `make test` has all policies with one fused optimizer, and all optimizers with one.
            marks=pytest.mark.slow if case.fused and policy != "CUTS" and case != FUSED[0] else (),
        )
        for case in WITHOUT_CLOSURE
        for policy in (("EVERYTHING", "CUTS", "ADAGC", "OBSERVES") if case.fused else ("SKIPS",))
    ],
)
def test_the_host_waits_no_more_than_without_healcore(case: Case, where: Any, policy: str):
    """Not at all for fused optimizers, in skips too."""
    # Elsewhere without a skip: a step that does not run would hide a sync of healcore.
    steps = 7 if case.fused else 4
    counted = []
    for healed in (True, False):
        optimizer = case.build()
        heal = attach(optimizer, getattr(policies, policy), engine=where) if healed else None
        with CountSyncs() as syncs:
            for i in range(steps):
                case.step(optimizer, i, heal=heal, factor=NAN if i == 4 else 1.0)
            if heal is not None:
                heal.metrics()
                heal.observe_eval(torch.tensor(1.0))
                heal.expect_change()
        counted.append(syncs.count)
    assert counted[0] == counted[1]
    assert not (case.fused and counted[0])


# -- the reset of the moments --------------------------------------------------------------------


@cases([*CASES, Case("Adagrad-half", Adagrad, HALF)])
def test_an_optimizer_with_reset_moments_continues_as_a_new_one(case: Case):
    ours, theirs = case.build(), case.build()
    for i in range(4):
        case.step(ours, i)
    reset_moments(ours)
    with torch.no_grad():
        for used, new in zip(parameters(ours), parameters(theirs), strict=True):
            new.copy_(used)
    for i in range(10, 14):
        case.step(ours, i)
        case.step(theirs, i)
        assert bits(parameters(ours)) == bits(parameters(theirs))
