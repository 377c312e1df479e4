"""Checks and averages the losses that a training loop observes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from healcore.core.signals import SignalError, check_scalar

_LARGEST = torch.finfo(torch.float32).max


def checked(name: str, value: Any) -> Tensor | float:
    """Checks one number. Returns a float, or a detached 0-d tensor of its own device and dtype.

    No host sync. NaN is accepted.

    Raises:
        SignalError: `value` is not a single real number.
    """
    if isinstance(value, Tensor):
        value = value.detach()
        is_real = not (value.is_complex() or value.dtype is torch.bool or value.is_meta)
        if value.numel() != 1 or not is_real:
            raise SignalError(
                f"{name} must be one real number, got a tensor of shape {tuple(value.shape)}, "
                f"{value.dtype} on {value.device}: pass {name}.float().mean()"
            )
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

    The sum has a fixed address, for CUDA graphs. The sum never shares memory with a loss, because a
    loop may change the loss in place after `observe` (``loss /= steps``).
    """

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.float32, device=device)
        self.weight = 0.0
        """Sum of the weights, 0 without losses."""

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss, which `checked` has returned."""
        if isinstance(loss, Tensor) and not loss.is_cpu:
            value = loss.to(self._total.device, torch.float32, non_blocking=True)
            value = value if weight == 1.0 else value * weight
        else:
            # As a number, because copying pageable memory to an accelerator is a sync. As a double,
            # because NumPy lacks some dtypes of torch.
            number = loss.double().numpy() if isinstance(loss, Tensor) else loss
            value = float(number) * weight
            if abs(value) > _LARGEST:
                value *= math.inf  # `fill_` would raise, but any other cast gives infinity
        if self.weight:
            self._total.add_(value)
        elif isinstance(value, Tensor):
            self._total.copy_(value, non_blocking=True)
        else:
            self._total.fill_(value)
        self.weight += weight

    def mean(self) -> Tensor | None:
        """0-d float32, or None without losses."""
        if self.weight in (0.0, 1.0):
            return self._total if self.weight else None
        # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
        return self._total / torch.full_like(self._total, self.weight)

    def clear(self) -> None:
        """Drops the losses."""
        self.weight = 0.0
