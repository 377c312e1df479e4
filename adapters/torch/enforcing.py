"""Carrying an order out: what is lent to the optimizer for one step, and taken back after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import fused, gradients
from healcore.torch.amp import AmpAttributes
from healcore.torch.learning_rate import BorrowedRate
from healcore.torch.measurement import DeviceOrder, Order
from healcore.torch.momentum import FirstMomentum
from healcore.torch.own_step import OwnStep


class Enforcer:
    """Clips, holds back and slows down one optimizer's step.

    Args:
        optimizer: the optimizer.
        by_kernel: the optimizer's fused kernels take `grad_scale` and `found_inf`.
        cuts_lr: the policy may scale the learning rate.
    """

    def __init__(self, optimizer: Optimizer, *, by_kernel: bool, cuts_lr: bool) -> None:
        self.by_kernel = by_kernel
        self.cuts_lr = cuts_lr
        self._amp = AmpAttributes()
        self._rate = BorrowedRate()
        self._hidden = gradients.HiddenGradients()
        self._momentum = FirstMomentum()
        self.own_step = OwnStep(optimizer)

    def uses_kernel(self, optimizer: Optimizer) -> bool:
        """Whether this step's clip goes through the fused kernel."""
        return self.by_kernel and fused.is_on(optimizer)

    def needs_host(self, optimizer: Optimizer, params: list[Tensor]) -> bool:
        """Whether the host must know the order of this step; see also `FirstMomentum`."""
        return not self.uses_kernel(optimizer) or self._momentum.needs_host(optimizer, params)

    def carry_out(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        order: Order,
        divisor: Tensor | None,
    ) -> None:
        """Enforces an order that the host knows: what is neutral is not touched at all.

        Args:
            optimizer: the optimizer about to step.
            everything: all its parameters.
            order: what to do.
            divisor: 0-d float32, a scale the gradients still carry, or None.
        """
        if order.skip:
            self.hold(optimizer, everything)
            return
        self.scale(optimizer, everything, order, divisor)
        if order.lr_scale != 1.0:
            self.slow_down(optimizer, order.lr_scale)

    def hand_over(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        params: list[Tensor],
        order: DeviceOrder,
    ) -> None:
        """Enforces an order that stays on the device: the fused kernel reads it there.

        Dividing by exactly 1 and subtracting a flag of exactly 0 change no bit.
        """
        if order.group_scale is not None:
            grads, factors = _pairs(everything, order.group_scale.unbind())
            gradients.scale_each_(grads, factors)
        self._amp.lend(optimizer, grad_divisor=order.grad_divisor, found_inf=order.found_inf)
        self._momentum.open(optimizer, params, order.found_inf)
        if self.cuts_lr:
            self._rate.scale(optimizer, order.lr_scale)

    def hold(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        """Makes the step an exact no-op, by hiding the gradients or leaving it out."""
        self._hidden.hide(params)
        self.own_step.leave_out(optimizer)

    def slow_down(self, optimizer: Optimizer, factor: float) -> None:
        """Scales every group's learning rate."""
        self._rate.scale(optimizer, factor)

    def scale(
        self,
        optimizer: Optimizer,
        everything: Sequence[Tensor],
        order: Order,
        divisor: Tensor | None = None,
    ) -> None:
        """Clips: in the fused kernel where there is one, else in a pass over the gradients."""
        if order.group_scale is not None:
            grads, factors = _pairs(everything, order.group_scale.tolist())
            smaller = [(g, f) for g, f in zip(grads, factors, strict=True) if f != 1.0]
            gradients.scale_each_([g for g, _ in smaller], [f for _, f in smaller])
        if order.grad_scale == 1.0:
            return
        if self.uses_kernel(optimizer):
            # In float32 and in this order, as the device seat computes it.
            device = everything[0].device
            scale = torch.full((), order.grad_scale, dtype=torch.float32, device=device)
            base = torch.ones_like(scale) if divisor is None else divisor
            self._amp.lend(optimizer, grad_divisor=base / scale, found_inf=None)
        else:
            gradients.scale_(_pairs(everything, everything)[0], order.grad_scale)

    def give_back(self, optimizer: Optimizer) -> None:
        """Takes back everything lent; harmless when nothing is."""
        self._momentum.close(optimizer)
        self._hidden.restore()
        self._rate.restore()
        self._amp.restore(optimizer)
        self.own_step.close(optimizer)


def _pairs(everything: Sequence[Tensor], values: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
    """The gradients there are, and of one value per parameter those that belong to them."""
    grads, kept = [], []
    for p, value in zip(everything, values, strict=True):
        if p.grad is not None:
            grads.append(p.grad)
            kept.append(value)
    return grads, kept
