"""An optimizer's gradients: their L2 norms in float32, and scaling them in place.

`torch.nn.utils.get_total_norm` gives its result in the gradients' dtype: a float16 norm above
65,504 is infinite, a bfloat16 one has three digits. On an accelerator the kernel gets a float32
result dtype. On a CPU it would then not be vectorised (192 bfloat16 tensors of 131,072 elements:
208 ms against 12), so half-precision gradients are copied to a small float32 buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

CHUNK = 1 << 18
"""Elements summed at a time on a CPU, in float32: over 25 M elements at once the sum loses up to
0.3 %, over pieces of this size below 1e-6."""

# Private, but clip_grad_norm_ and every foreach optimizer use it.
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_HALVES = (torch.float16, torch.bfloat16)


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group by group: the order of the per-tensor norms and factors."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """L2 norm of each gradient, 0-d float32 on its device (a DTensor for a DTensor).

    Gradients may be dense or sparse, on any device and of any dtype.
    """
    found: dict[int, Tensor] = {}
    batches: dict[tuple[object, ...], dict[int, Tensor]] = {}
    for i, grad in enumerate(grads):
        if grad.layout is not torch.strided:
            grad = (grad.coalesce() if grad.is_sparse else grad).values()
        if grad.dtype.is_complex:
            grad = torch.view_as_real(grad)
        device, dtype, mesh = grad.device, grad.dtype, _mesh(grad)
        if mesh is None and device.type == "cpu" and (dtype in _HALVES or grad.numel() > CHUNK):
            found[i] = _norm_in_pieces(grad)
        else:
            batches.setdefault((device, dtype, mesh), {})[i] = grad
    for (_, dtype, _), batch in batches.items():
        result = torch.float32 if dtype in _HALVES else None
        each = _foreach_norm([*batch.values()], 2, dtype=result)
        if dtype is torch.float64:
            each = [norm.to(torch.float32) for norm in each]
        found.update(zip(batch, each, strict=True))
    return [found[i] for i in range(len(grads))]


def total_norm(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients from `norms` of each, 0-d float32 on `device`, no DTensor."""
    by_mesh: dict[object, list[Tensor]] = {}
    for norm in norms:
        by_mesh.setdefault(_mesh(norm), []).append(norm)
    plain = by_mesh.pop(None, [])
    for members in by_mesh.values():  # one all_reduce for each mesh, not one for each tensor
        combined = torch.linalg.vector_norm(torch.stack(members))
        plain.append(combined.full_tensor())  # type: ignore[attr-defined]
    if any(norm.device != device for norm in plain):
        plain = [norm.to(device, non_blocking=True) for norm in plain]
    return torch.linalg.vector_norm(torch.stack(plain)) if len(plain) > 1 else plain[0]


def norm_vector(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Norms as one (n,) float32 tensor on `device`; 0 for a parameter without a gradient."""
    zero = torch.zeros((), dtype=torch.float32, device=device)
    parts = []
    for norm in norms:
        if norm is None:
            norm = zero
        elif hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()  # type: ignore[operator]
        parts.append(norm.to(device, non_blocking=True))
    return torch.stack(parts)


def scale_(params: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies all gradients in place by one number or 0-d tensor."""
    # One call takes either plain tensors or the DTensors of one mesh.
    batches: dict[tuple[torch.device, object], list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            batches.setdefault((p.grad.device, _mesh(p.grad)), []).append(_values(p.grad))
    for (device, _), tensors in batches.items():
        on_device = factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(tensors, on_device)  # pyright: ignore[reportPrivateImportUsage]


def scale_each_(params: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
    """Multiplies each parameter's gradient in place by its own factor (per-tensor clipping)."""
    for p, factor in zip(params, factors, strict=True):
        if p.grad is None or (not isinstance(factor, Tensor) and factor == 1.0):
            continue
        if isinstance(factor, Tensor):
            factor = factor.to(p.grad.device, non_blocking=True)
        _values(p.grad).mul_(factor)


def _values(grad: Tensor) -> Tensor:
    """The stored values of a gradient, in its memory. Not for norms: they may be uncoalesced."""
    if grad.layout is torch.strided:
        return grad
    return grad._values() if grad.is_sparse else grad.values()


def _mesh(tensor: Tensor) -> object:
    """The device mesh of a DTensor, None of a plain tensor."""
    return None if type(tensor) is Tensor else getattr(tensor, "device_mesh", None)


def _norm_in_pieces(grad: Tensor) -> Tensor:
    """Norm of a large or half-precision CPU tensor, `CHUNK` elements at a time."""
    flat = grad.reshape(-1)  # a view unless its strides forbid one
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float32)
    if flat.dtype in _HALVES:
        buffer = torch.empty(min(CHUNK, flat.numel()), dtype=torch.float32)
        norms = [
            torch.linalg.vector_norm(buffer[: piece.numel()].copy_(piece))
            for piece in flat.split(CHUNK)
        ]
    else:
        norms = list(_foreach_norm(flat.split(CHUNK), 2))
    whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return whole.to(torch.float32)
