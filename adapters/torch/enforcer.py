"""Enforces a decision on one optimizer step: clips it, skips it, scales its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import fused, gradients
from healcore.torch.measurement import DeviceOrder, HostOrder
from healcore.torch.momentum import FirstStepMomentum
from healcore.torch.step_overrides import AmpOverride, HiddenGradients, LrOverride
from healcore.torch.third_party_step import ThirdPartyStep


class Enforcer:
    """Enforces orders on one optimizer. Everything is restored after the step.

    Args:
        optimizer: the optimizer.
        by_kernel: the optimizer's fused kernels take `grad_scale` and `found_inf`.
        cuts_lr: the policy may scale the learning rate.
    """

    def __init__(self, optimizer: Optimizer, *, by_kernel: bool, cuts_lr: bool) -> None:
        self.by_kernel = by_kernel
        self.cuts_lr = cuts_lr
        self._amp = AmpOverride()
        self._lr = LrOverride()
        self._hidden = HiddenGradients()
        self._momentum = FirstStepMomentum()
        self.third_party_step = ThirdPartyStep(optimizer)

    def uses_kernel(self, optimizer: Optimizer) -> bool:
        """Whether the fused kernel clips this step."""
        return self.by_kernel and fused.is_on(optimizer)

    def needs_host(self, optimizer: Optimizer, params: list[Tensor]) -> bool:
        """Whether the host must know the order of this step; see also `FirstStepMomentum`."""
        return not self.uses_kernel(optimizer) or self._momentum.needs_host(optimizer, params)

    def enforce(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        order: HostOrder,
        divisor: Tensor | None,
    ) -> None:
        """Enforces an order that the host knows. A neutral part of it touches nothing.

        Args:
            optimizer: the optimizer about to step.
            everything: all its parameters.
            order: what to enforce.
            divisor: 0-d float32, a scale the gradients still carry, or None.
        """
        if order.skip:
            self.skip(optimizer, everything)
            return
        self.clip(optimizer, everything, order, divisor)
        if order.lr_scale != 1.0:
            self.scale_lr(optimizer, order.lr_scale)

    def enforce_on_device(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        params: list[Tensor],
        order: DeviceOrder,
    ) -> None:
        """Enforces an order that stays on the device, where the fused kernel reads it.

        A neutral order changes no bit: the kernel divides by exactly 1 and subtracts a flag of
        exactly 0.
        """
        if order.group_scale is not None:
            grads, factors = _with_gradients(everything, order.group_scale.unbind())
            gradients.scale_each_(grads, factors)
        self._amp.set(optimizer, grad_divisor=order.grad_divisor, found_inf=order.found_inf)
        self._momentum.before_step(optimizer, params, order.found_inf)
        if self.cuts_lr:
            self._lr.scale(optimizer, order.lr_scale)

    def skip(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        """Makes the step an exact no-op: hides the gradients, or does not run `step()` at all."""
        self._hidden.hide(params)
        self.third_party_step.omit(optimizer)

    def scale_lr(self, optimizer: Optimizer, factor: float) -> None:
        """Scales every group's learning rate."""
        self._lr.scale(optimizer, factor)

    def clip(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        order: HostOrder,
        divisor: Tensor | None = None,
    ) -> None:
        """Clips: in the fused kernel where there is one, else in a pass over the gradients."""
        if order.group_scale is not None:
            grads, factors = _with_gradients(everything, order.group_scale.tolist())
            smaller = [(g, f) for g, f in zip(grads, factors, strict=True) if f != 1.0]
            gradients.scale_each_([g for g, _ in smaller], [f for _, f in smaller])
        if order.grad_scale == 1.0:
            return
        if self.uses_kernel(optimizer):
            # In float32 and in this order, as the device engine computes it.
            device = everything[0].device
            scale = torch.full((), order.grad_scale, dtype=torch.float32, device=device)
            base = torch.ones_like(scale) if divisor is None else divisor
            self._amp.set(optimizer, grad_divisor=base / scale, found_inf=None)
        else:
            gradients.scale_(_with_gradients(everything, everything)[0], order.grad_scale)

    def restore(self, optimizer: Optimizer) -> None:
        """Restores everything that was changed for the step; does nothing when nothing was."""
        self._momentum.after_step(optimizer)
        self._hidden.restore()
        self._lr.restore()
        self._amp.restore(optimizer)
        self.third_party_step.reset(optimizer)


def _with_gradients(
    everything: Sequence[Tensor], values: Sequence[Any]
) -> tuple[list[Tensor], list[Any]]:
    """The gradients that exist, and those of one value per parameter that belong to them."""
    grads, kept = [], []
    for p, value in zip(everything, values, strict=True):
        if p.grad is not None:
            grads.append(p.grad)
            kept.append(value)
    return grads, kept
