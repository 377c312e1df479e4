"""Sharded parameters (FSDP2), alone and mixed with plain ones (tensor parallel)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

from healcore.torch import attach
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, Where, host_and_device


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    if dist.is_initialized():
        pytest.skip("torch.distributed is in use by another test")
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(kind: str) -> list[Parameter]:
    """The same numbers, plain, sharded, or as tensor parallel has them with a plain LayerNorm."""
    random = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=random) for shape in ((4, 3), (3,), (3, 2), (2,))]
    if kind == "plain":
        return [Parameter(value) for value in values]
    mesh, other = (init_device_mesh("cpu", (1,), mesh_dim_names=(n,)) for n in ("a", "b"))
    placed = [
        distribute_tensor(values[0], mesh, [Shard(0)]),
        distribute_tensor(values[1], mesh, [Replicate()]) if kind == "sharded" else values[1],
        distribute_tensor(values[2], other if kind == "mixed" else mesh, [Shard(1)]),
        distribute_tensor(values[3], mesh, [Replicate()]) if kind == "sharded" else values[3],
    ]
    return [Parameter(value) for value in placed]


def gradients(params: list[Parameter], i: int, factor: float) -> None:
    random = torch.Generator().manual_seed(10 + i)
    for p in params:
        grad = torch.randn(p.shape, generator=random) * factor
        if isinstance(p, DTensor):
            grad = distribute_tensor(grad, p.device_mesh, p.placements)
        p.grad = grad


def whole(params: list[Parameter]) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach() for p in params]


def run(
    kind: str, make: type[Optimizer], options: dict[str, Any], engine: Any, where: Where
) -> Any:
    params = parameters(kind)
    optimizer: Any = make(params, lr=0.1, **options)  # type: ignore[call-arg]
    heal = attach(optimizer, engine, engine=where)
    for i in range(8):
        gradients(params, i, NAN if i == 5 else 1.0)
        heal.observe(1.0)
        optimizer.step()
    return whole(params), {n: float(v) for n, v in heal.metrics().items()}


@host_and_device
@pytest.mark.parametrize(
    ("kind", "make", "options", "policy"),
    [
        ("sharded", AdamW, {}, "ADAGC"),
        ("sharded", AdamW, {"fused": True}, "fixed"),
        ("sharded", AdamW, {"fused": True}, "ADAGC"),
        ("sharded", SGD, {"momentum": 0.9}, "CUTS"),
        ("mixed", AdamW, {"foreach": False}, "CUTS"),
        ("mixed", SGD, {"momentum": 0.9, "foreach": False}, "fixed"),
        ("mixed", SGD, {"momentum": 0.9, "foreach": False}, "ADAGC"),
    ],
)
def test_sharded_parameters_are_healed_as_plain_ones_are(
    kind: str, make: type[Optimizer], options: dict[str, Any], policy: str, where: Where
):
    engine = policies.fixed(0.5) if policy == "fixed" else getattr(policies, policy)
    placed, metrics = run(kind, make, options, engine, where)
    plain, reference = run("plain", make, options, engine, where)
    assert metrics == pytest.approx(reference, rel=1e-5, nan_ok=True)
    for a, b in zip(placed, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
