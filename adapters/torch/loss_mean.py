"""`LossMean`: the mean of the losses that the loop reports for one step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from healcore.core.numerics import FLOAT32_MAX
from healcore.core.signals import SignalError, check_scalar
from healcore.torch import gradients


def one_number(name: str, value: Any) -> Tensor | float:
    """Checks one number that the loop reports. No host sync, and NaN is accepted.

    Args:
        name: what the number is, for the message.
        value: a number, or a tensor of one element, also a DTensor.

    Returns:
        A float, or a detached 0-d tensor of the value's own device and dtype.

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
        if value.ndim:
            value = value.reshape(())
        return value
    return float(check_scalar(name, value))


def float32_tensor(value: Tensor | float, device: torch.device) -> Tensor:
    """A number in float32 on a device. No host sync.

    Args:
        value: what `one_number` has returned, or a number.
        device: the device of the result.

    Returns:
        0-d float32; a float32 tensor of this device is returned itself.
    """
    if isinstance(value, Tensor):
        if not value.is_cpu or device.type == "cpu":
            return gradients.to_device(value, device, torch.float32)
        # As a number, because copying pageable memory to an accelerator is a sync. As a double,
        # because NumPy lacks some dtypes of torch.
        value = float(value.double().numpy())
    if abs(value) > FLOAT32_MAX:  # `full` raises instead of rounding the number to Inf
        value = math.copysign(math.inf, value)
    return torch.full((), value, dtype=torch.float32, device=device)


class LossMean:
    """Weighted mean of the losses since the last step, on the parameters' device, without a sync.

    Args:
        device: the parameters' device.

    Attributes:
        count: number of losses since the last step.
        weight: sum of their weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.clear()

    def add(self, loss: Tensor | float, weight: float = 1.0) -> None:
        """Adds one micro-batch's loss. No host sync.

        Args:
            loss: what `one_number` has returned for the loss.
            weight: its weight in the mean, above 0.
        """
        # A product, because a loop may change its loss in place later (``loss /= steps``).
        value = float32_tensor(loss, self._device) * weight
        if self.count:
            value = self._total + value
        self._total = value
        self.weight += weight
        self.count += 1

    def mean(self) -> Tensor | None:
        """The weighted mean of the losses since the last step.

        Returns:
            0-d float32 tensor on the device of the losses, or None without losses. No sync.
        """
        if not self.count:
            return None
        return _quotient(self._total, self.weight)

    def clear(self) -> None:
        """Drops the losses since the last step."""
        self.count = 0
        self.weight = 0.0


def _quotient(total: Tensor, weight: float) -> Tensor:
    """The total divided by the weight, with the same bits on every device."""
    if weight == 1.0:  # as usual
        return total
    # Not `total / weight`: on CUDA that is a multiplication by the reciprocal.
    return total / torch.full_like(total, weight)
