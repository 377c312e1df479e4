"""`Namespace`: the array namespace of the core in torch, with the bits of NumPy and XLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from healcore.core.array_namespace import Array, ArrayNamespace, Number
from healcore.core.clipping import EDGES
from healcore.core.numerics import FLUSH


class Namespace(ArrayNamespace):
    """Array functions of the core on one device, in eager tensor operations.

    Rejected: array-api-compat, which keeps torch's inexact `sqrt`. The core's only table is copied
    to the device once.

    Args:
        device: where the arrays are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch)
        self._device = device
        self._edges = torch.as_tensor(EDGES).to(device)

    def where(self, condition: Tensor, x: Array | Number, y: Array | Number, /) -> Tensor:
        """`torch.where`."""
        return torch.where(condition, x, y)

    def minimum(self, x: Tensor, y: Tensor | Number, /) -> Tensor:
        """`torch.clamp_max`, which also takes a Python number."""
        return torch.clamp_max(x, y)

    def maximum(self, x: Tensor, y: Tensor | Number, /) -> Tensor:
        """`torch.clamp_min`, which also takes a Python number."""
        return torch.clamp_min(x, y)

    def clip(self, x: Tensor, low: float, high: float, /) -> Tensor:
        """`torch.clamp`."""
        return torch.clamp(x, low, high)

    def sqrt(self, x: Tensor, /) -> Tensor:
        """Square root, correctly rounded in float32 as in NumPy and XLA.

        Computed in float64: its 53 bits exceed 2 * 24 + 2, so rounding twice equals rounding once.
        On a CPU `torch.sqrt` in float32 (MKL's VML) differs by one ulp in 17 % of cases.
        """
        if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
            return torch.sqrt(x.to(torch.float64)).to(torch.float32)
        return torch.sqrt(x)

    def as_float(self, x: Tensor, /) -> Tensor:
        """`torch.Tensor.to`."""
        return x.to(torch.float32)

    def as_int(self, x: Tensor, /) -> Tensor:
        """`torch.Tensor.to`."""
        return x.to(torch.int32)

    def arange(self, n: int, /) -> Tensor:
        """`torch.arange` on the device."""
        return torch.arange(n, device=self._device)

    def asarray(self, x: Any, /) -> Tensor:
        """The core's only table, `EDGES`, on the device."""
        del x
        return self._edges

    def flush(self, x: Tensor, limit: float = FLUSH, /) -> Tensor:
        """One operation instead of three."""
        return torch.nn.functional.hardshrink(x, limit)

    def product(self, x: Any, y: Any, /) -> Tensor:
        """A plain product: only a compiler fuses it with an addition."""
        return x * y

    def quotient(self, x: Tensor, y: Any, /) -> Tensor:
        """A plain division. torch divides exactly by a tensor, but not by a Python number."""
        if not isinstance(y, Tensor):
            y = torch.full_like(x, y)
        return x / y
