"""What is changed on an optimizer for one step, and restored after it.

Three things: each group's learning rate, `.grad`, and the two attributes that fused kernels read.
Each class saves what it replaces and restores it, unless somebody else has written there since.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_ABSENT = object()


class LrOverride:
    """Replaces every group's `lr` for one step.

    The user's own object (float or tensor) is saved and restored, never computed back, so a
    scheduler sees what it wrote. A new `lr` that is written during the step stays.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[dict[str, Any], Any, Any]] = []

    def scale(self, optimizer: Optimizer, factor: float | Tensor) -> None:
        """Multiplies the rate of every group that has one.

        Args:
            optimizer: the optimizer about to step.
            factor: a Python number, or a 0-d float32 tensor next to the parameters: then the
                rate becomes a tensor too, which the fused kernels read on the device. Against a
                Python rate that costs a rounding: float32(lr) in place of the double lr, on
                accelerators (their kernels take a float32 pointer); in float64, and so to the
                bit, on a CPU.
        """
        for group in optimizer.param_groups:
            original = group.get("lr")
            if original is None:
                continue
            if isinstance(factor, Tensor) and not isinstance(original, Tensor):
                on_cpu = factor.device.type == "cpu"
                scaled = factor.to(torch.float64 if on_cpu else torch.float32) * original
            else:
                scaled = original * factor
            group["lr"] = scaled
            self._replaced.append((group, scaled, original))

    def restore(self) -> None:
        """Restores every rate; does nothing when none was replaced."""
        for group, scaled, original in self._replaced:
            if group["lr"] is scaled:
                group["lr"] = original
        self._replaced.clear()


class HiddenGradients:
    """Sets every `.grad` to None for one step: an exact no-op for all of torch's optimizers.

    Zeroed gradients are not a no-op: Adam, momentum SGD and Muon move on them. The same tensors are
    restored afterwards: with DDP's `gradient_as_bucket_view` they are views into its buckets, and a
    log of gradient norms may still want to see them.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def hide(self, params: Sequence[Tensor]) -> None:
        """Sets `.grad` to None on all of `params` that have one."""
        for p in params:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def restore(self) -> None:
        """Restores what `hide` took, unless a new gradient is there by now."""
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden.clear()


class AmpOverride:
    """Sets `grad_scale` and `found_inf`, which GradScaler and fused kernels use, for one step.

    For a fused optimizer `GradScaler.step` sets both attributes, calls `optimizer.step()`, then
    *deletes* both; it also multiplies its scale by a `grad_scale` that it finds set, and after
    `unscale_` it passes on what it finds. So healcore leaves nothing there between steps, and
    restores after a step what was there before it.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[str, Tensor, Any]] = []

    @staticmethod
    def read(optimizer: Optimizer) -> tuple[Tensor | None, Tensor | None]:
        """What a GradScaler (or the user) has set for the step that begins.

        Returns:
            `(grad_scale, found_inf)`, 0-d float32 tensors on the scaler's device, or None.
        """
        scale, found = (optimizer.__dict__.get(name) for name in ("grad_scale", "found_inf"))
        return (
            scale if isinstance(scale, Tensor) else None,
            found if isinstance(found, Tensor) else None,
        )

    def set(
        self, optimizer: Optimizer, *, grad_divisor: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Sets what is not None, until `restore`."""
        for name, value in (("grad_scale", grad_divisor), ("found_inf", found_inf)):
            if value is not None:
                self._replaced.append((name, value, optimizer.__dict__.get(name, _ABSENT)))
                setattr(optimizer, name, value)

    def restore(self, optimizer: Optimizer) -> None:
        """Restores both, unless somebody has set them again (after an exception)."""
        for name, value, before in self._replaced:
            if optimizer.__dict__.get(name) is not value:
                continue
            if before is _ABSENT:
                delattr(optimizer, name)
            else:
                setattr(optimizer, name, before)
        self._replaced.clear()
