"""The norm is taken in float32, for gradients of any dtype."""

from __future__ import annotations

import pytest
import torch

from healcore.torch import gradients

CPU = torch.device("cpu")


def norm(*grads: torch.Tensor) -> float:
    found = gradients.total_norm(gradients.norms(grads), CPU)
    assert found.dtype is torch.float32
    assert found.shape == ()
    return float(found)


def test_float32_gives_the_bits_of_get_total_norm():
    grads = [torch.randn(shape) for shape in [(300, 7), (50,), (1,)]]
    assert norm(*grads) == float(torch.nn.utils.get_total_norm(grads))


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


SIZES = [1, gradients.SMALL, gradients.SMALL + 1, gradients.CHUNK, gradients.CHUNK + 1]


@pytest.mark.parametrize("first", SIZES)
@pytest.mark.parametrize("second", [*SIZES, 3 * gradients.CHUNK])
def test_each_norm_is_of_its_own_tensor(first: int, second: int):
    """Small tensors, large ones and ones of several pieces have norms of their own, in order."""
    random = torch.Generator().manual_seed(first)
    sizes = [(first, torch.float32), (second, torch.float32), (first, torch.bfloat16)]
    grads = [torch.randn(n, generator=random).to(kind) * 10**i for i, (n, kind) in enumerate(sizes)]
    found = gradients.norms(grads)
    assert [each.dtype for each in found] == [torch.float32] * 3
    for each, grad in zip(found, grads, strict=True):
        assert float(each) == pytest.approx(float(grad.double().norm()), rel=1e-5)


@pytest.mark.parametrize("n", [3, gradients.SMALL + 1])
def test_a_conjugated_view_is_measured_and_scaled(n: int):
    parameter = torch.nn.Parameter(torch.zeros(n, dtype=torch.complex64))
    values = torch.full((n,), 3 + 4j)
    parameter.grad = values.conj()
    assert norm(parameter.grad) == pytest.approx(5 * n**0.5)
    gradients.scale_([parameter], 0.5)
    assert parameter.grad[0] == 1.5 - 2j


def test_strided_gradients_and_another_default_device():
    grad = torch.randn(3 * gradients.CHUNK, generator=torch.Generator().manual_seed(0))
    assert norm(grad[::3]) == pytest.approx(float(grad[::3].double().norm()), rel=1e-6)
    with torch.device("meta"):
        assert norm(grad.bfloat16()) == pytest.approx(
            float(grad.bfloat16().double().norm()), rel=1e-5
        )


def test_duplicates_of_a_sparse_gradient_add_up_first():
    grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True
    )
    assert norm(grad) == 5.0
    assert not grad.is_coalesced()  # measured on a copy


def test_mixed_dtypes_complex_and_empty():
    grads = [
        torch.full((4,), 1.0, dtype=torch.float64),
        torch.full((1,), 3 + 4j),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.bfloat16),
    ]
    assert norm(*grads) == pytest.approx(29**0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_nonfinite_number_makes_the_norm_nonfinite(bad: float, dtype: torch.dtype):
    grad = torch.zeros(gradients.CHUNK + 5, dtype=dtype)
    grad[-1] = bad
    assert not torch.isfinite(torch.tensor(norm(torch.ones(3), grad)))


def test_a_vector_has_zero_where_there_is_no_gradient():
    each = gradients.norms([torch.ones(4), torch.ones(9)])
    assert gradients.norm_vector([each[0], None, each[1]], CPU).tolist() == [2.0, 0.0, 3.0]


def test_dtensors_mix_with_plain_tensors():
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available() or dist.is_initialized():
        pytest.skip("torch.distributed is missing, or in use by another test")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain = [torch.randn(8, 4), torch.randn(8, 4).bfloat16(), torch.randn(3)]
        mixed = [distribute_tensor(g, mesh, [Shard(0)]) for g in plain[:2]] + plain[2:]
        assert norm(*mixed) == pytest.approx(norm(*plain), rel=1e-6)
        vector = gradients.norm_vector(gradients.norms(mixed), CPU)
        torch.testing.assert_close(vector, gradients.norm_vector(gradients.norms(plain), CPU))
    finally:
        dist.destroy_process_group()
