"""The L2 norm of the gradients, in float32 whatever they are stored in.

`torch.nn.utils.get_total_norm` gives its result in the gradients' dtype: a float16 norm above
65,504 is infinite, a bfloat16 one has three digits. On an accelerator the fused kernel is
therefore called with a float32 result dtype. On a CPU that dtype would leave the vectorised path
(192 bfloat16 tensors of 131,072 elements: 208 ms against 12), so half-precision gradients are
copied to a small float32 buffer there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK = 1 << 18
"""Elements summed at a time on a CPU. The kernel adds up in float32: over 25 M elements at once it
loses up to 0.3 %, over pieces of this size below 1e-6."""

# Underscored and public in all but name: clip_grad_norm_ and every foreach optimizer use it.
_foreach_norm = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
_NOTHING = torch.zeros(())
_HALVES = (torch.float16, torch.bfloat16)


def per_tensor(grads: Sequence[Tensor]) -> list[Tensor]:
    """L2 norm of each gradient.

    Args:
        grads: dense or sparse, any device and dtype; sparse ones are coalesced into a copy first.

    Returns:
        One 0-d float32 tensor each, on the gradient's device (a DTensor for a DTensor).
    """
    found: list[Tensor] = [_NOTHING] * len(grads)
    fused: dict[tuple[object, ...], tuple[list[int], list[Tensor]]] = {}
    for i, grad in enumerate(grads):
        if grad.layout is not torch.strided:
            grad = (grad.coalesce() if grad.is_sparse else grad).values()
        device, dtype, mesh = grad.device, grad.dtype, None
        if dtype.is_complex:
            grad = torch.view_as_real(grad)
            dtype = grad.dtype
        if type(grad) is not Tensor:
            mesh = getattr(grad, "device_mesh", None)
        if mesh is None and device.type == "cpu" and (dtype in _HALVES or grad.numel() > CHUNK):
            found[i] = _in_pieces(grad)
            continue
        indices, tensors = fused.setdefault((device, dtype, mesh), ([], []))
        indices.append(i)
        tensors.append(grad)
    for (_, dtype, _), (indices, tensors) in fused.items():
        norms = _foreach_norm(tensors, 2, dtype=torch.float32 if dtype in _HALVES else None)
        if dtype is torch.float64:
            norms = [norm.to(torch.float32) for norm in norms]
        for i, norm in zip(indices, norms, strict=True):
            found[i] = norm
    return found


def total(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Combines norms into one.

    Args:
        norms: from `per_tensor`; DTensors of different meshes may be mixed with plain tensors.
        device: where the result is wanted.

    Returns:
        0-d float32 plain tensor on `device`.
    """
    plain = [norm for norm in norms if type(norm) is Tensor]
    sharded: dict[object, list[Tensor]] = {}
    if len(plain) < len(norms):
        for norm in norms:
            if type(norm) is not Tensor:
                mesh = getattr(norm, "device_mesh", None)
                sharded.setdefault(mesh, []).append(norm)
    plain += sharded.pop(None, [])
    for members in sharded.values():  # one all_reduce for each mesh, not one for each tensor
        combined = torch.linalg.vector_norm(torch.stack(members))
        plain.append(combined.full_tensor())  # type: ignore[attr-defined]
    if any(norm.device != device for norm in plain):
        plain = [norm.to(device, non_blocking=True) for norm in plain]
    return torch.linalg.vector_norm(torch.stack(plain)) if len(plain) > 1 else plain[0]


def vector(norms: Sequence[Tensor | None], device: torch.device) -> Tensor:
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


def _in_pieces(grad: Tensor) -> Tensor:
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
