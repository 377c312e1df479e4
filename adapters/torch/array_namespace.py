"""`TORCH`: the array namespace of the core in torch, with the bits of NumPy and XLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from healcore.core.array_namespace import FLUSH, ArrayNamespace, register


class TorchNamespace(ArrayNamespace):
    """The functions of the core for torch, in eager tensor operations. `TORCH` is the instance.

    Rejected: array-api-compat, which keeps torch's inexact `sqrt`. The core's only table is copied
    to a device once.
    """

    # These also take a Python number, which `torch.minimum` and `torch.maximum` do not.
    minimum = staticmethod(torch.clamp_max)
    maximum = staticmethod(torch.clamp_min)

    def __init__(self) -> None:
        super().__init__(torch)
        self._tables: dict[torch.device, Tensor] = {}

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

    def places(self, values: Tensor, /) -> Tensor:
        """`torch.arange` on the device of `values`."""
        return torch.arange(values.shape[-1], device=values.device)

    def table(self, numbers: Any, like: Tensor, /) -> Tensor:
        """The core's only table, `healcore.core.clipping.EDGES`, on the device of `like`."""
        if like.device not in self._tables:
            self._tables[like.device] = torch.as_tensor(numbers).to(like.device)
        return self._tables[like.device]

    def flush(self, x: Tensor, limit: float = FLUSH, /) -> Tensor:
        """One operation instead of three."""
        return torch.nn.functional.hardshrink(x, limit)

    def product(self, x: Any, y: Any, /) -> Tensor:
        """A plain product: only a compiler fuses it with an addition."""
        return x * y

    def quotient(self, x: Tensor, y: Tensor, /) -> Tensor:
        """A plain division. torch divides exactly by a tensor, but not by a Python number."""
        return x / y


TORCH = TorchNamespace()
"""The namespace of tensors."""

register(Tensor, lambda tensor: TORCH)
