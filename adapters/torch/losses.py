"""Checks and averages the losses that a training loop observes, and detects late ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from healcore import console
from healcore.core.signals import SignalError, check_scalar
from healcore.torch.errors import ObservedTooLateError

_LARGEST = torch.finfo(torch.float32).max


def checked(name: str, value: Any) -> Tensor | float:
    """One number as a float, or without a sync as a detached 0-d tensor of its device and dtype.

    SignalError if it is None, not a real number, or not one element. NaN is accepted.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() != 1:
            raise SignalError(
                f"{name} must be one number, got a tensor of shape {tuple(value.shape)}: "
                f"reduce it first, for example {name}.mean()"
            )
        if value.is_complex() or value.dtype is torch.bool:
            raise SignalError(
                f"{name} must be a real number, got a tensor of {value.dtype}: "
                f"pass {name}.abs() or {name}.float()"
            )
        if value.is_meta:
            raise SignalError(f"{name} is on the meta device and has no value: pass a real tensor")
        if type(value) is not Tensor and hasattr(value, "full_tensor"):
            value = value.full_tensor()  # a DTensor
        return value.reshape(()) if value.ndim else value
    if isinstance(value, (str, bytes, bool)):
        raise SignalError(
            f"{name} must be a number, got {value!r} of type {type(value).__name__}: "
            f"pass the step's {name} as a float or a 0-d tensor"
        )
    return float(check_scalar(name, value))


class LossMean:
    """Weighted mean of the losses since the last step, on the parameters' device, without a sync.

    The sum has a fixed address, for CUDA graphs, and is no alias of a loss that is changed in place
    after it was observed (``loss /= steps``).
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.float32, device=device)
        self._count = 0
        self._weight = 0.0

    def __len__(self) -> int:
        return self._count

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss, already `checked`."""
        if isinstance(loss, Tensor) and loss.is_cpu:
            # As a number, because copying pageable host memory to an accelerator is a sync.
            if (
                loss.dtype.is_floating_point and loss.dtype.itemsize < 4
            ):  # NumPy has not all of them
                loss = loss.float()
            loss = float(loss.numpy())
        if not isinstance(loss, Tensor):
            number = loss * weight
            if abs(number) > _LARGEST:
                number *= math.inf  # `fill_` raises where every other cast gives infinity
            if self._count:
                self._total.add_(number)
            else:
                self._total.fill_(number)
        elif self._count:
            on_device = loss.to(self._total.device, torch.float32, non_blocking=True)
            self._total.add_(on_device, alpha=weight)
        else:
            self._total.copy_(loss, non_blocking=True)
            if weight != 1.0:
                self._total.mul_(weight)
        self._count += 1
        self._weight += weight

    def mean(self) -> Tensor | None:
        """0-d float32; None without losses."""
        if not self._count or self._weight == 1.0:
            return self._total if self._count else None
        # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
        return self._total / torch.full_like(self._total, self._weight)

    def clear(self) -> None:
        """Drops the losses."""
        self._count, self._weight = 0, 0.0


class LateLoss:
    """Detects `observe` after the step: each loss would be judged with the next step's gradients.

    Later a correct and a late loop look the same: step, observe, backward. But a late loop has no
    loss at its first step, and the first loss is observed after its backward pass. So the first
    loss is checked, if exactly one step came before it.
    """

    def __init__(self) -> None:
        self._steps: float = 0
        self._grad: tuple[Tensor, Tensor, int] | None = None
        self._hook: Any = None
        self._reached = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to check."""
        return self._steps > 1 and self._hook is None

    def before_step(self, params: Sequence[Tensor], has_loss: bool) -> None:
        """Call it before a step is judged, with the parameters that have a gradient.

        ObservedTooLateError if the loss observed for it belongs to the step before.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            if not self._reached:
                raise ObservedTooLateError(
                    "the loss was observed after the step that it belongs to: its backward pass "
                    "was over before, and every step would be judged by the loss of the step "
                    "before; call observe(loss) before optimizer.step()"
                )
        self._steps = math.inf if has_loss else self._steps + 1
        self._grad = None
        if self._steps == 1:
            p = params[0]
            assert p.grad is not None
            self._grad = p, p.grad, p.grad._version

    def observed(self, loss: Any) -> None:
        """Call it when a loss is observed."""
        if self._steps != 1:
            return
        self._steps = math.inf
        (p, grad, version), self._grad = self._grad or (None, None, 0), None
        if p is None or grad is None or (p.grad is not None and p.grad is not grad):
            return  # another backward pass has run since
        if grad._version != version:
            return
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._hook = loss.register_hook(self._backward)
        else:
            console.warning(
                "the first loss was observed after the first step: if it belongs to that step, "
                "all losses come one step late; call observe(loss) before optimizer.step()"
            )

    def cancel(self) -> None:
        """Ends the check: the backward pass of the first loss was given up and is done again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _backward(self, _: Tensor) -> None:
        self._reached = True
