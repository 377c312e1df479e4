"""Computes L2 norms (float32) of an optimizer's gradients, and scales the gradients.

`torch.nn.utils.get_total_norm` returns the gradients' dtype: a float16 norm above 65,504 is
infinite, a bfloat16 norm has three digits. On an accelerator the kernel gets a float32 result
dtype. CPU kernels are not vectorised for it: 192 bfloat16 tensors of 131,072 elements take 208 ms
instead of 12 ms. So half-precision gradients on a CPU are copied to a small float32 buffer.
torch's norm of a float32 CPU tensor uses one thread. `torch.dot` uses all threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

ParamGroup: TypeAlias = dict[str, Any]
"""One of an optimizer's `param_groups`: "params", "lr" and other settings."""

SUM_CHUNK = 1 << 18
"""Elements of one float32 sum on a CPU. A single sum over 25 M elements loses up to 0.3 %. Sums
over pieces of this size lose about 1e-6 of random numbers, and 3e-5 of equal numbers."""
MAX_FOREACH_SIZE = 1 << 15
"""Elements of a CPU tensor up to which `_foreach_norm` is faster than `torch.dot`."""

# Private, but clip_grad_norm_ and every foreach optimizer use it.
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_HALVES = (torch.float16, torch.bfloat16)
_WIDE_DTYPES = (torch.float32, torch.float64)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters of an optimizer, group by group.

    This is the order of per-tensor norms and factors everywhere in this package.

    Args:
        optimizer: an optimizer without a wrapper.
    """
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


def reduced(params: Sequence[Tensor]) -> list[Tensor]:
    """Reduces gradients that are partial sums over the ranks, and returns all gradients.

    Gradients are partial sums in sequence-parallel LayerNorms. The optimizer's step would reduce
    them anyway, with at least the same communication.

    Args:
        params: parameters whose `.grad` is replaced where it is a partial sum. Every rank of their
            meshes has to call it.

    Returns:
        The gradients in the order of the parameters, without None.
    """
    grads: list[Tensor] = []
    for p in params:
        grad = p.grad
        if grad is None:
            continue
        if type(grad) is not Tensor and is_dtensor(grad) and grad.placements != p.placements:  # type: ignore[attr-defined]
            grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
            p.grad = grad
        grads.append(grad)
    return grads


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norm of each gradient. No host sync.

    Args:
        grads: gradients, dense or sparse, on any device and of any dtype. For a DTensor, this
            rank's part is measured.

    Returns:
        For each gradient its norm, 0-d float32 on its device.
    """
    are_small = bool(grads)
    for grad in grads:
        if (
            type(grad) is not Tensor
            or not grad.is_cpu
            or grad.dtype is not torch.float32
            or grad.numel() > MAX_FOREACH_SIZE
            or grad.layout is not torch.strided
        ):
            are_small = False
            break
    if are_small:  # as in many models; saves half of the time per tensor
        return [*_foreach_norm([*grads], 2)]
    norm_at: dict[int, Tensor] = {}
    by_dot: dict[int, Tensor] = {}
    batches: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for i, grad in enumerate(grads):
        if type(grad) is not Tensor:
            grad = local_part(grad)
        if grad.layout is not torch.strided:
            if grad.is_sparse:
                grad = grad.coalesce()  # an index may occur several times
            grad = grad.values()
        dtype = grad.dtype
        large = grad.numel() > MAX_FOREACH_SIZE and dtype in _WIDE_DTYPES and type(grad) is Tensor
        if grad.is_cpu and (large or dtype in _HALVES):
            by_dot[i] = grad
        else:
            batches.setdefault((grad.device, dtype), {})[i] = grad
    for (_, dtype), batch in batches.items():
        result_dtype = None
        if dtype in _HALVES:
            result_dtype = torch.float32
        batch_norms = _foreach_norm([*batch.values()], 2, dtype=result_dtype)
        if batch_norms[0].dtype is not torch.float32:
            batch_norms = [norm.to(torch.float32) for norm in batch_norms]
        norm_at.update(zip(batch, batch_norms, strict=True))
    norm_at.update(zip(by_dot, _norms_by_dot([*by_dot.values()]), strict=True))
    return [norm_at[i] for i in range(len(grads))]


def norms_of_clip(grads: Sequence[Tensor]) -> tuple[Sequence[Tensor] | None, Tensor] | None:
    """The norm of all gradients, with the bits that `torch.nn.utils.clip_grad_norm_` computes.

    The order of the gradients matters: their norms are summed in this order.

    Args:
        grads: gradients in the order of the program's clip, at least one.

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
    norms = _foreach_norm([*grads], 2.0)
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    if norms[0].dtype is not torch.float32:
        return None, total
    return norms, total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """The factor by which `torch.nn.utils.clip_grad_norm_` multiplies: at most 1, 0-d, no sync.

    torch computes `number / tensor` as a product with the reciprocal. A division differs in the
    last bit.

    Args:
        norm: the norm of all gradients, 0-d.
        max_norm: the limit.
    """
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def whole_norms(norms: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norms of whole DTensors from the norms of this rank's parts. Keeps norms of plain tensors.

    One small all_reduce for each dimension of each mesh. Every rank of the mesh has to call it.

    Args:
        norms: the norms of this rank's parts, 0-d float32 each.
        tensors: the tensors with these norms, which may be plain tensors and DTensors.

    Returns:
        The norms of the whole tensors, in the same order.
    """
    whole = [*norms]
    by_mesh: dict[Any, list[int]] = {}
    for i, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            by_mesh.setdefault(tensor.device_mesh, []).append(i)  # type: ignore[attr-defined]
    for mesh, members in by_mesh.items():
        parts = norm_vector([norms[i] for i in members], norms[members[0]].device)
        squares = parts.double() ** 2
        for dim in range(mesh.ndim):
            copies: list[int] = []
            for i in members:
                placement = tensors[i].placements[dim]  # type: ignore[attr-defined]
                if placement.is_replicate():  # every rank has the same part, which counts once
                    copies.append(mesh.size(dim))
                else:
                    copies.append(1)
            squares /= torch.tensor(copies, dtype=squares.dtype).to(squares.device)
            dist.all_reduce(squares, group=mesh.get_group(dim))
        for i, norm in zip(members, squares.sqrt().to(torch.float32).unbind(), strict=True):
            whole[i] = norm
    return whole


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device. Waits only for a copy to the host, which may be read at once.

    Args:
        tensor: any tensor. It is returned itself if it is there already.
        device: the device.
        dtype: the dtype of the result, by default the tensor's own.
    """
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients from the norm of each gradient. No sync, unless to a CPU.

    Args:
        norms: 0-d float32 each, on any devices, at least one.
        device: where the result is.

    Returns:
        0-d float32.
    """
    here: list[Tensor] = []
    for norm in norms:
        if norm.device != device:
            norm = to_device(norm, device)
        here.append(norm)
    if len(here) == 1:
        return here[0]
    return torch.linalg.vector_norm(torch.stack(here))


def norm_vector(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Norms of several parameters as one tensor.

    Args:
        norms: 0-d float32 each, or None for a parameter without a gradient.
        device: where the result is.

    Returns:
        (n,) float32, with 0 for None.
    """
    if not norms:
        return torch.zeros(0, dtype=torch.float32, device=device)
    zero = torch.zeros((), dtype=torch.float32, device=device)
    parts: list[Tensor] = []
    for norm in norms:
        if norm is None:
            parts.append(zero)
        else:
            parts.append(to_device(norm, device))
    return torch.stack(parts)


def scale_(params: Sequence[Tensor], factor: float) -> None:
    """Multiplies all gradients in place by one number.

    Args:
        params: the parameters. A parameter without a gradient is ignored.
        factor: the number, such as the factor of a clip.
    """
    grads = [_values(p.grad) for p in params if p.grad is not None]
    if grads:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


def multiply_(params: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies all gradients in place by a 0-d tensor, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        params: parameters, whose gradients are dense plain tensors, see `norms_of_clip`. Parameters
            without a gradient are ignored.
        factor: 0-d, on any device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            by_device.setdefault(p.grad.device, []).append(p.grad)
    for device, grads in by_device.items():
        torch._foreach_mul_(grads, factor.to(device))  # pyright: ignore[reportPrivateImportUsage]


def scale_each_(params: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
    """Multiplies each parameter's gradient in place by its own factor (per-tensor clipping).

    Args:
        params: parameters, with or without a gradient.
        factors: one number, or one 0-d tensor, for each parameter.
    """
    for p, factor in zip(params, factors, strict=True):
        if p.grad is None:
            continue
        if isinstance(factor, Tensor):
            factor = to_device(factor, p.grad.device)
        elif factor == 1.0:
            continue
        _values(p.grad).mul_(factor)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is a DTensor, so that this rank holds only a part of it.

    Does not import torch.distributed.tensor, which takes a while and which most programs do not
    use.
    """
    return type(tensor) is not Tensor and hasattr(tensor, "device_mesh")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, without a copy; a plain tensor unchanged."""
    if is_dtensor(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def _values(grad: Tensor) -> Tensor:
    """The stored values of a gradient, without a copy. A sparse gradient may repeat values."""
    grad = local_part(grad)
    if grad.is_sparse:
        return grad._values()
    if grad.layout is not torch.strided:
        return grad.values()
    if grad.is_conj():
        return grad.conj()  # without the flag of a conjugated view
    return grad


def _norms_by_dot(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Norms of dense CPU tensors, by float32 or float64 sums of `SUM_CHUNK` elements."""
    if not grads:
        return []
    dots: list[Tensor] = []
    for grad in grads:
        for piece in _pieces(grad):  # one after another: they may share a buffer
            dots.append(torch.dot(piece, piece))
    squares = torch.stack(dots)
    if len(squares) > len(grads):
        counts = [max(1, -(-grad.numel() // SUM_CHUNK)) for grad in grads]
        squares = torch.stack([part.sum() for part in squares.split(counts)])
    return squares.sqrt_().to(torch.float32).unbind()


def _pieces(grad: Tensor) -> Iterable[Tensor]:
    """1-d pieces of a tensor. Half precision is copied to float32, in one buffer for all pieces."""
    flat = grad.contiguous().view(-1)  # a copy only of a tensor with gaps or transposed
    pieces: Sequence[Tensor] = (flat,)
    if flat.numel() > SUM_CHUNK:
        pieces = flat.split(SUM_CHUNK)
    if flat.dtype not in _HALVES:
        return pieces
    buffer = torch.empty(pieces[0].numel(), dtype=torch.float32, device=flat.device)
    return (buffer[: piece.numel()].copy_(piece) for piece in pieces)
