"""An optimizer's parameters, and scaling their gradients in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group by group: the order of the per-tensor norms and factors."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def values(grad: Tensor) -> Tensor:
    """The stored values of a gradient, dense or sparse, sharing its memory.

    An uncoalesced sparse gradient holds duplicate entries separately: right for scaling, which is
    linear, wrong for a norm (see `norms.per_tensor`).
    """
    if grad.layout is torch.strided:
        return grad
    return grad._values() if grad.is_sparse else grad.values()


def scale_(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiplies gradients in place by one factor, as `clip_grads_with_norm_` does.

    Args:
        grads: gradients on any devices, of any dtypes; DTensors and plain ones may be mixed.
        factor: a number, or a 0-d tensor.
    """
    # One call takes either plain tensors or the DTensors of one mesh.
    batches: dict[tuple[torch.device, object], list[Tensor]] = {}
    for grad in grads:
        mesh = None if type(grad) is Tensor else getattr(grad, "device_mesh", None)
        batches.setdefault((grad.device, mesh), []).append(values(grad))
    for (device, _), tensors in batches.items():
        on_device = factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(tensors, on_device)  # pyright: ignore[reportPrivateImportUsage]


def scale_each_(grads: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
    """Multiplies each gradient in place by its own factor (per-tensor clipping)."""
    for grad, factor in zip(grads, factors, strict=True):
        if isinstance(factor, Tensor):
            factor = factor.to(grad.device, non_blocking=True)
        values(grad).mul_(factor)
