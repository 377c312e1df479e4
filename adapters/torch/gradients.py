"""Computes L2 norms (float32) of an optimizer's gradients, and scales the gradients.

`torch.nn.utils.get_total_norm` returns the gradients' dtype: a float16 norm above 65,504 is
infinite, a bfloat16 norm has three digits. On an accelerator the kernel gets a float32 result
dtype. CPU kernels are not vectorised for it: 192 bfloat16 tensors of 131,072 elements take 208 ms
instead of 12 ms. So half-precision gradients on a CPU are copied to a small float32 buffer.
torch's norm of a float32 CPU tensor uses one thread. `torch.dot` uses all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

CHUNK = 1 << 18
"""Elements of one float32 sum on a CPU. A single sum over 25 M elements loses up to 0.3 %. Sums
over pieces of this size lose about 1e-6 of random numbers, and 3e-5 of equal numbers."""
SMALL = 1 << 15
"""Elements of a CPU tensor up to which `_foreach_norm` is faster than `torch.dot`."""

# Private, but clip_grad_norm_ and every foreach optimizer use it.
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_HALVES, _WIDE = (torch.float16, torch.bfloat16), (torch.float32, torch.float64)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group by group: the order of the per-tensor norms and factors."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def complete_(params: Sequence[Tensor]) -> None:
    """Reduces gradients that are partial sums on each rank, as in sequence-parallel LayerNorms.

    The optimizer's step would reduce them anyway, with at least the same communication.
    """
    for p in params:
        grad = p.grad
        if type(grad) is not Tensor and is_dtensor(grad) and grad.placements != p.placements:  # type: ignore[union-attr]
            p.grad = grad.redistribute(placements=p.placements)  # type: ignore[union-attr]


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """L2 norm of each gradient, 0-d float32 on its device; of a DTensor, this rank's part.

    Gradients may be dense or sparse, on any device and of any dtype.
    """
    small = [
        type(grad) is Tensor
        and grad.is_cpu
        and grad.dtype is torch.float32
        and grad.numel() <= SMALL
        and grad.layout is torch.strided
        for grad in grads
    ]
    if small and all(small):  # of many models; saves half of the time per tensor
        return [*_foreach_norm([*grads], 2)]
    found: dict[int, Tensor] = {}
    by_dot: dict[int, Tensor] = {}
    batches: dict[tuple[object, ...], dict[int, Tensor]] = {}
    for i, grad in enumerate(grads):
        if type(grad) is not Tensor:
            grad = local_part(grad)
        if grad.layout is not torch.strided:
            grad = (grad.coalesce() if grad.is_sparse else grad).values()
        dtype = grad.dtype
        large = grad.numel() > SMALL and dtype in _WIDE and type(grad) is Tensor
        if grad.is_cpu and (large or dtype in _HALVES):
            by_dot[i] = grad
        else:
            batches.setdefault((grad.device, dtype), {})[i] = grad
    for (_, dtype), batch in batches.items():
        result = torch.float32 if dtype in _HALVES else None
        each = _foreach_norm([*batch.values()], 2, dtype=result)
        if each[0].dtype is not torch.float32:
            each = [norm.to(torch.float32) for norm in each]
        found.update(zip(batch, each, strict=True))
    found.update(zip(by_dot, _norms_by_dot([*by_dot.values()]), strict=True))
    return [found[i] for i in range(len(grads))]


def norms_of_clip(grads: Sequence[Tensor]) -> tuple[Sequence[Tensor] | None, Tensor] | None:
    """The norm of all gradients, with the bits that `torch.nn.utils.clip_grad_norm_` computes.

    The order of the gradients matters: their norms are summed in this order.

    Returns:
        The float32 norm of each gradient, or None if torch computes it in another dtype; and the
        norm of all gradients, 0-d in the dtype that torch gives it, on the first gradient's device.
        None if a gradient is sparse, or a DTensor or another subclass.
    """
    device, dtype = grads[0].device, grads[0].dtype
    is_uniform = device.type in ("cpu", "cuda")
    for grad in grads:
        if type(grad) is not Tensor or grad.layout is not torch.strided:
            return None
        is_uniform = is_uniform and grad.dtype is dtype and grad.device == device
    if not is_uniform:  # only torch knows in which order it visits several dtypes and devices
        return None, torch.nn.utils.get_total_norm(grads)
    each = _foreach_norm([*grads], 2.0)
    total = torch.linalg.vector_norm(torch.stack(each), 2.0)
    return (each if each[0].dtype is torch.float32 else None), total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies: at most 1, 0-d, no sync.

    torch computes `number / tensor` as a product with the reciprocal. A division differs in the
    last bit.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def whole_norms(norms: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norms of whole DTensors from the norms of this rank's parts. Keeps norms of plain tensors.

    One small all_reduce for each dimension of each mesh. Every rank of the mesh has to call it.
    """
    whole = [*norms]
    by_mesh: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            by_mesh.setdefault(tensor.device_mesh, []).append(i)  # type: ignore[attr-defined]
    for mesh, members in by_mesh.items():
        squares = norm_vector([norms[i] for i in members], norms[members[0]].device).double() ** 2
        for dim in range(mesh.ndim):
            copies = [
                mesh.size(dim) if tensors[i].placements[dim].is_replicate() else 1  # type: ignore[attr-defined]
                for i in members
            ]
            squares /= torch.tensor(copies, dtype=squares.dtype).to(squares.device)
            dist.all_reduce(squares, group=mesh.get_group(dim))
        for i, norm in zip(members, squares.sqrt().to(torch.float32).unbind(), strict=True):
            whole[i] = norm
    return whole


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device. Waits only for a copy to the host, which may be read at once."""
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients from the norm of each gradient, 0-d float32 on `device`."""
    here = [n if n.device == device else moved(n, device) for n in norms]
    return torch.linalg.vector_norm(torch.stack(here)) if len(here) > 1 else here[0]


def norm_vector(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Norms as one (n,) float32 tensor on `device`; 0 for a parameter without a gradient."""
    zero = torch.zeros((), dtype=torch.float32, device=device)
    parts = [zero if norm is None else moved(norm, device) for norm in norms]
    return torch.stack(parts) if parts else zero.new_zeros(0)


def scale_(params: Sequence[Tensor], factor: float) -> None:
    """Multiplies all gradients in place by one number."""
    grads = [_values(p.grad) for p in params if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def multiply_(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place by a 0-d tensor, as `torch.nn.utils.clip_grad_norm_` does.

    The gradients are dense plain tensors, see `norms_of_clip`.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            by_device.setdefault(p.grad.device, []).append(p.grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]


def scale_each_(params: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
    """Multiplies each parameter's gradient in place by its own factor (per-tensor clipping)."""
    for p, factor in zip(params, factors, strict=True):
        if p.grad is None or (not isinstance(factor, Tensor) and factor == 1.0):
            continue
        if isinstance(factor, Tensor):
            factor = moved(factor, p.grad.device)
        _values(p.grad).mul_(factor)


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor. Does not import torch.distributed.tensor."""
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without a copy; a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def _values(grad: Tensor) -> Tensor:
    """The stored values of a gradient, without a copy. Not for norms: sparse values may repeat."""
    grad = local_part(grad)
    if grad.layout is not torch.strided:
        return grad._values() if grad.is_sparse else grad.values()
    return grad.conj() if grad.is_conj() else grad  # without the flag of a conjugated view


def _norms_by_dot(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Norms of dense CPU tensors, `CHUNK` elements at a time. The sums are float32 or float64."""
    if not grads:
        return []
    squares = torch.stack([torch.dot(part, part) for grad in grads for part in _pieces(grad)])
    if len(squares) > len(grads):
        counts = [max(1, -(-grad.numel() // CHUNK)) for grad in grads]
        squares = torch.stack([part.sum() for part in squares.split(counts)])
    return squares.sqrt_().to(torch.float32).unbind()


def _pieces(grad: Tensor) -> Iterable[Tensor]:
    """1-d pieces of a tensor. Half precision is copied to float32, in one buffer for all pieces."""
    flat = grad.contiguous().view(-1)  # a copy only of a tensor with gaps or transposed
    pieces = flat.split(CHUNK) if flat.numel() > CHUNK else (flat,)
    if flat.dtype not in _HALVES:
        return pieces
    buffer = torch.empty(pieces[0].numel(), dtype=torch.float32, device=flat.device)
    return (buffer[: piece.numel()].copy_(piece) for piece in pieces)
