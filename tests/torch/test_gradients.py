"""The norm is taken in float32, for gradients of any dtype."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from healcore.torch import gradients

CPU = torch.device("cpu")


def norm(*grads: torch.Tensor) -> float:
    found = gradients.total_norm(gradients.norms(grads), CPU)
    assert found.dtype is torch.float32
    assert found.shape == ()
    return float(found)


def test_float16_does_not_overflow():
    grads = [torch.full((1000,), 6e4, dtype=torch.float16) for _ in range(2)]
    assert torch.isinf(torch.nn.utils.get_total_norm(grads))
    assert norm(*grads) == pytest.approx(6e4 * 2000**0.5, rel=1e-3)


def test_bfloat16_loses_no_digits():
    random = torch.Generator().manual_seed(0)
    grads = [torch.randn(4099, generator=random).bfloat16() for _ in range(3)]
    exact = float(torch.cat(grads).double().norm())
    assert abs(float(torch.nn.utils.get_total_norm(grads)) / exact - 1) > 1e-4
    assert norm(*grads) == pytest.approx(exact, rel=1e-6)


def test_a_large_tensor_is_summed_in_pieces():
    grad = torch.rand(20 * gradients.CHUNK + 16) + 5
    assert norm(grad) == pytest.approx(float(grad.double().norm()), rel=1e-6)
    assert norm(grad.view(16, -1).t()) == pytest.approx(norm(grad), rel=1e-6)


SIZES = [1, gradients.SMALL, gradients.SMALL + 1, gradients.CHUNK, 3 * gradients.CHUNK]


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
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    assert norm(grad) == 5.0
    assert not grad.is_coalesced()  # measured on a copy


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_nonfinite_number_makes_the_norm_nonfinite(bad: float, dtype: torch.dtype):
    grad = torch.zeros(gradients.CHUNK + 5, dtype=dtype)
    grad[-1] = bad
    assert not torch.isfinite(torch.tensor(norm(torch.ones(3), grad)))
