"""Computes L2 norms (float32) of an optimizer's gradients, and scales the gradients.

`torch.nn.utils.get_total_norm` returns the gradients' dtype: a float16 norm above 65,504 is
infinite, a bfloat16 norm has three digits. On an accelerator the kernel gets a float32 result
dtype. CPU kernels are not vectorised for it: 192 bfloat16 tensors of 131,072 elements take 208 ms
instead of 12 ms. So half-precision gradients on a CPU are converted piece by piece. torch's norm of
a float32 CPU tensor uses one thread. `torch.dot` uses all threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

ParamGroup: TypeAlias = dict[str, Any]
"""One of an optimizer's `param_groups`: "params", "lr" and other settings."""

SUM_CHUNK = 1 << 18
"""Elements of one float32 sum on a CPU. A single sum over 25 M elements loses up to 0.3 %. Sums
over pieces of this size lose about 1e-6 of random numbers, and 3e-5 of equal numbers."""
MAX_FOREACH_SIZE = 1 << 15
"""Elements of a CPU tensor up to which `_foreach_norm` is faster than `torch.dot`."""
HALVES = (torch.float16, torch.bfloat16)

# Private, but clip_grad_norm_ and every foreach optimizer use them.
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_foreach_mul_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]


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
        params: parameters with gradients. A `.grad` is replaced where it is a partial sum. Every
            rank of their meshes has to call it.

    Returns:
        The gradients in the order of the parameters.
    """
    grads: list[Tensor] = []
    for p in params:
        grad: Any = p.grad
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
    squares: dict[int, Tensor] = {}
    batches: dict[Any, dict[int, Tensor]] = {}
    for i, grad in enumerate(grads):
        if type(grad) is not Tensor:
            grad = local_part(grad)
        if grad.layout is not torch.strided:
            if grad.is_sparse:
                grad = grad.coalesce()  # an index may occur several times
            grad = grad.values()
        dtype = grad.dtype
        is_large = grad.numel() > MAX_FOREACH_SIZE and grad.is_floating_point()
        if grad.is_cpu and type(grad) is Tensor and (is_large or dtype in HALVES):
            squares[i] = _square_by_dot(grad)
        else:
            # On a CPU the device is None: a `torch.device` takes as long as the rest of this loop.
            key = (None if grad.is_cpu else grad.device, dtype)
            batches.setdefault(key, {})[i] = grad
    found: list[Any] = [None] * len(grads)
    if squares:
        roots = torch.stack([*squares.values()]).sqrt_().to(torch.float32).unbind()
        for i, norm in zip(squares, roots, strict=True):
            found[i] = norm
    for (_, dtype), batch in batches.items():
        result_dtype = None
        if dtype in HALVES:
            result_dtype = torch.float32
        batch_norms = _foreach_norm([*batch.values()], 2, dtype=result_dtype)
        if batch_norms[0].dtype is not torch.float32:
            batch_norms = [norm.to(torch.float32) for norm in batch_norms]
        for i, norm in zip(batch, batch_norms, strict=True):
            found[i] = norm
    return found


def _square_by_dot(grad: Tensor) -> Tensor:
    """Squared norm of a dense CPU tensor, by sums of `SUM_CHUNK` elements in at least float32."""
    dots: list[Tensor] = []
    for piece in grad.reshape(-1).split(SUM_CHUNK):
        if piece.dtype in HALVES:
            piece = piece.float()
        dots.append(torch.dot(piece, piece))
    if len(dots) == 1:
        return dots[0]
    return torch.stack(dots).sum()


def norms_of_clip(grads: Sequence[Tensor]) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """The norm of all gradients, with the bits that `torch.nn.utils.clip_grad_norm_` computes.

    The order of the gradients matters: their norms are summed in this order.

    Args:
        grads: gradients in the order of the program's clip, at least one.

    Returns:
        The float32 norm of each gradient, or None if torch computes it in another dtype; and the
        norm of all gradients, 0-d in the dtype that torch gives it, on the first gradient's device.
        Both None if a gradient is sparse, or a DTensor or another subclass.
    """
    device, dtype = grads[0].device, grads[0].dtype
    is_uniform = device.type in ("cpu", "cuda")
    for grad in grads:
        if type(grad) is not Tensor or grad.layout is not torch.strided:
            return None, None
        is_uniform = is_uniform and grad.dtype is dtype and grad.device == device
    if not is_uniform:  # only torch knows in which order it visits several dtypes and devices
        return None, torch.nn.utils.get_total_norm(grads)
    norms = _foreach_norm([*grads], 2.0)
    total = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    if norms[0].dtype is not torch.float32:
        return None, total
    return norms, total


def whole_norms(norms: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norms of whole DTensors from the norms of this rank's parts. Keeps norms of plain tensors.

    A small all_reduce for each DTensor. Every rank of the mesh has to call it.

    Args:
        norms: the norms of this rank's parts, 0-d float32 each.
        tensors: the tensors with these norms, which may be plain tensors and DTensors.

    Returns:
        The norms of the whole tensors, in the same order.
    """
    whole: list[Tensor] = []
    for norm, tensor in zip(norms, tensors, strict=True):
        if is_dtensor(tensor):
            from torch.distributed.tensor import DTensor, Partial

            given: Any = tensor
            placements = [p if p.is_replicate() else Partial() for p in given.placements]
            square = norm.double() ** 2
            square = DTensor.from_local(square, given.device_mesh, placements, run_check=False)
            norm = square.full_tensor().sqrt().to(torch.float32)
        whole.append(norm)
    return whole


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on a device. Waits only for a copy to the host, which may be read at once.

    Args:
        tensor: any tensor. It is returned itself if it is there already.
        device: the device.
        dtype: the dtype of the result, by default the tensor's own.
    """
    if tensor.device == device and dtype in (None, tensor.dtype):
        return tensor  # as usual; `to` would take longer
    return tensor.to(device, dtype or tensor.dtype, non_blocking=device.type != "cpu")


def norm_vector(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Norms of several parameters as one tensor.

    Args:
        norms: 0-d float32 each, or None for a parameter without a gradient.
        device: where the result is.

    Returns:
        (n,) float32, with 0 for None.
    """
    zero = torch.zeros((), dtype=torch.float32, device=device)
    parts = [zero]
    for norm in norms:
        if norm is None:
            parts.append(zero)
        else:
            parts.append(to_device(norm, device))
    return torch.stack(parts)[1:]


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients from the norm of each gradient. No sync, unless to a CPU.

    Args:
        norms: 0-d float32 each, on any devices, at least one.
        device: where the result is.

    Returns:
        0-d float32.
    """
    if len(norms) == 1:
        return to_device(norms[0], device)
    return torch.linalg.vector_norm(torch.stack([to_device(norm, device) for norm in norms]))


def scale_(params: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies all gradients in place by one number, as `torch.nn.utils.clip_grad_norm_` does.

    Args:
        params: the parameters. A parameter without a gradient is ignored.
        factor: the number, or a 0-d tensor on any device.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            by_device.setdefault(p.grad.device, []).append(_values(p.grad))
    for device, grads in by_device.items():
        own = factor
        if isinstance(own, Tensor):
            own = to_device(own, device)
        _foreach_mul_(grads, own)


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
