"""What `attach` takes, how a step is called, and which norm its gradients have."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import Linear, Parameter
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from healcore.errors import ParametersChangedError
from healcore.policy import PolicyError
from healcore.torch import AttachError, attach, gradients
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, bits, parameters, snapshot
from tests.torch.optimizer_cases import NAN, Case, host_and_device


def steps(heal: Any) -> int:
    return int(heal.metrics()["heal/steps"])


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (Linear(2, 2), {}, AttachError, "whose step"),
        (None, {"engine": "gpu"}, AttachError, "engine"),
        (None, {"scaler": 1024.0}, AttachError, "scaler"),
        (None, {"pp_mesh": 3}, AttachError, "pp_mesh is a DeviceMesh of one dimension, got 3"),
        (None, {"clip": {"max_norm": -1}}, PolicyError, "clip"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_refused_changes_nothing(given: Any, options: Any, error: Any, message: str):
    optimizer = AdamW([Parameter(torch.ones(2))])
    with pytest.raises(error, match=message):
        attach(given or optimizer, "zclip", **options)
    assert not optimizer._optimizer_step_pre_hooks
    heal = attach(optimizer, policies.SKIPS)
    with pytest.raises(AttachError, match="healed already"):
        attach(optimizer, policies.SKIPS)
    heal.detach()
    attach(optimizer, policies.SKIPS)


def test_removed_parameters_are_refused_where_each_has_a_history():
    first = Parameter(torch.ones(2))
    optimizer = AdamW([{"params": [first]}, {"params": [Parameter(torch.ones(3))]}, {"params": []}])
    attach(optimizer, policies.ADAGC)
    first.grad = torch.ones(2)
    del optimizer.param_groups[1]
    with pytest.raises(ParametersChangedError, match="parameters"):
        optimizer.step()
    assert torch.equal(first.detach(), torch.ones(2))


@host_and_device
def test_the_loss_that_a_closure_returns_is_judged(where: Any):
    p = Parameter(torch.ones(3))
    optimizer = AdamW([p], fused=True)
    heal = attach(optimizer, policies.SKIPS, engine=where)
    p.grad = torch.ones(3)
    optimizer.step(lambda: (p * 2).sum())  # type: ignore[arg-type]
    assert float(heal.metrics()["heal/loss"]) == 6.0


class Decaying(AdamW):
    """Has arithmetic of its own, which no flag can stop, and clears the gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.mul_(0.9)
        loss = super().step(closure)
        self.zero_grad()
        return loss


@host_and_device
def test_a_step_with_its_own_arithmetic_is_skipped_too(where: Any):
    case = Case("", Decaying, {"fused": True})
    optimizer = case.build()
    heal = attach(optimizer, policies.SKIPS, engine=where)
    assert not heal.healed_step.has_kernel
    case.step(optimizer, 0, heal=heal)
    before = snapshot(optimizer)
    case.step(optimizer, 1, heal=heal, factor=NAN)
    assert_same(before, snapshot(optimizer))
    assert all(p.grad is None for p in parameters(optimizer)), "the next step adds to no NaN"


@pytest.mark.parametrize("case", [Case("", SGD), Case("", AdamW, {"fused": True})], ids=str)
def test_schedulers_made_before_and_after_attach_step_without_a_warning(
    case: Case, recwarn: pytest.WarningsRecorder
):
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
    """A copy that still heals would count its steps for the original optimizer."""
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
def test_a_step_that_raises_does_not_end_healing(where: Any, fused: bool):
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
def test_a_step_without_gradients_is_a_no_op(where: Any):
    optimizer = AdamW([Parameter(torch.ones(3))], fused=True)
    heal = attach(optimizer, policies.EVERYTHING, engine=where)
    before = snapshot(optimizer)
    state = heal.state_dict()
    heal.observe(1.0)
    optimizer.step()
    assert_same(before, snapshot(optimizer))
    assert heal.state_dict() == state
    assert heal.last_decision() is None
    heal.observe(2.0)  # the first loss was that step's
    parameters(optimizer)[0].grad = torch.ones(3)
    optimizer.step()
    assert float(heal.metrics()["heal/loss"]) == 2.0


LARGE = 20 * gradients.SUM_CHUNK + 16
SIZES = [
    1,
    gradients.MAX_FOREACH_SIZE,
    gradients.MAX_FOREACH_SIZE + 1,
    gradients.SUM_CHUNK,
    3 * gradients.SUM_CHUNK,
]


def norm(*grads: torch.Tensor) -> float:
    found = gradients.total_norm(gradients.norms(grads), torch.device("cpu"))
    assert found.dtype is torch.float32
    assert found.shape == ()
    return float(found)


@pytest.mark.parametrize(
    ("grads", "torch_fails"),
    [
        ([torch.full((1000,), 6e4, dtype=torch.float16)] * 2, True),  # overflows
        ([torch.linspace(-1, 1, 4099).bfloat16()] * 3, True),  # loses digits
        ([torch.linspace(5, 6, LARGE)], False),
        ([torch.linspace(5, 6, LARGE).view(16, -1).t()], False),
    ],
    ids=["float16", "bfloat16", "large", "transposed"],
)
def test_it_is_that_of_the_exact_numbers(grads: list[torch.Tensor], torch_fails: bool):
    """Squares overflow in float16 and lose digits in bfloat16, so the norm would be wrong."""
    exact = float(torch.cat(grads).double().norm())
    assert norm(*grads) == pytest.approx(exact, rel=1e-6)
    theirs = float(torch.nn.utils.get_total_norm(grads))
    assert not torch_fails or abs(theirs / exact - 1) > 1e-4
    grads[-1][-1] = NAN
    assert not torch.isfinite(torch.tensor(norm(*grads)))


@pytest.mark.parametrize(("first", "second"), [*pairwise(SIZES), (SIZES[-1], SIZES[0])])
def test_each_norm_is_of_its_own_tensor(first: int, second: int):
    """Small tensors, large ones and ones of several pieces have norms of their own, in order."""
    random = torch.Generator().manual_seed(first)
    sizes = [(first, torch.float32), (second, torch.float32), (first, torch.bfloat16)]
    grads = [torch.randn(n, generator=random).to(kind) * 10**i for i, (n, kind) in enumerate(sizes)]
    found = gradients.norms(grads)
    assert [each.dtype for each in found] == [torch.float32] * 3
    for each, grad in zip(found, grads, strict=True):
        assert float(each) == pytest.approx(float(grad.double().norm()), rel=1e-5)


def test_duplicates_of_a_sparse_gradient_add_up_first():
    places, values = torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0])
    grad = torch.sparse_coo_tensor(places, values, (5,), check_invariants=True)
    assert norm(grad) == 5.0
    assert not grad.is_coalesced()  # measured on a copy


@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_a_hook_sets_within_a_cut_step_is_the_rate_of_the_next_step(fused: bool):
    """A warm-up in a hook of the optimizer runs while the rate is scaled for the step."""
    p: Any = Parameter(torch.ones(3))
    optimizer = SGD([p], lr=0.1, fused=fused)
    heal = attach(optimizer, policies.CUTS, engine="host")
    schedule = iter((0.1, 0.2, 0.4))
    optimizer.register_step_post_hook(
        lambda *_: optimizer.param_groups[0].__setitem__("lr", next(schedule))
    )
    moved = []
    for gradient in (1.0, NAN, 1.0, 1.0):
        p.grad = torch.full((3,), gradient)
        before = p.detach().clone()
        optimizer.step()
        moved.append(float((before - p.detach())[0]))
    assert int(heal.metrics()["heal/lr_cuts"]) == 1
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.4)
    halves = [0.1 * 0.5, 0.2 * 0.5]
    assert moved[2:] == pytest.approx(halves, rel=1e-5)
