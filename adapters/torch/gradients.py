"""Finding an optimizer's gradients, hiding them for one step, and scaling them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


def parameters(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, group after group: the order of the per-tensor norms and factors."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def values(grad: Tensor) -> Tensor:
    """The stored numbers of a gradient, dense or sparse, sharing its memory.

    Duplicate entries of an uncoalesced sparse gradient are still apart in it: right for scaling,
    which is linear, wrong for a norm (see `norms.per_tensor`).
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
    together: dict[tuple[torch.device, object], list[Tensor]] = {}
    for grad in grads:
        mesh = None if type(grad) is Tensor else getattr(grad, "device_mesh", None)
        together.setdefault((grad.device, mesh), []).append(values(grad))
    for (device, _), tensors in together.items():
        on_device = factor.to(device, non_blocking=True) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(tensors, on_device)  # pyright: ignore[reportPrivateImportUsage]


def scale_each_(grads: Sequence[Tensor], factors: Sequence[float | Tensor]) -> None:
    """Multiplies each gradient in place by its own factor (per-tensor clipping)."""
    for grad, factor in zip(grads, factors, strict=True):
        if isinstance(factor, Tensor):
            factor = factor.to(grad.device, non_blocking=True)
        values(grad).mul_(factor)


class HiddenGradients:
    """Takes every `.grad` away for the length of one step: the exact no-op of every optimizer.

    Zeroed gradients are not one: Adam, momentum SGD and Muon move on them. The same tensors are
    put back afterwards, not left None: with DDP's `gradient_as_bucket_view` they are views into
    its buckets, and a log of gradient norms may still want to see them.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def hide(self, params: Sequence[Tensor]) -> None:
        """Sets `.grad` to None on all of `params` that have one."""
        for p in params:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def restore(self) -> None:
        """Puts back what `hide` took, unless something new is there by now."""
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden.clear()
