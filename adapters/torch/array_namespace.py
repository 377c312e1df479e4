"""`Namespace`: the array namespace of the core in torch, with the bits of NumPy and XLA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from healcore.core.array_namespace import PRODUCT_LIMIT, Array, ArrayNamespace, Number
from healcore.core.clipping import EDGES

_KINDS = {float: (torch.float32,), int: (torch.float32, torch.int32)}
"""Type of a Python number -> dtypes of a tensor with which the number has the same dtype."""


class Namespace(ArrayNamespace):
    """Array functions of the core on one device, each in one or two torch calls.

    All trace under ``torch.compile(fullgraph=True)``. Rejected: array-api-compat, which breaks the
    graph in Dynamo (measured) and keeps torch's inexact `sqrt`. The core's only table, and each
    number, is copied to the device once.

    Args:
        device: where the arrays are.
    """

    float32 = torch.float32
    int32 = torch.int32

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edges = torch.as_tensor(EDGES).to(device)
        self._numbers: dict[tuple[Any, torch.dtype, torch.device], Tensor] = {}

    def where(self, condition: Tensor, x: Array | Number, y: Array | Number, /) -> Tensor:
        """`torch.where`, in which at most one of `x` and `y` is a Python number.

        A Python number becomes a tensor once, and not at every call.
        """
        if not isinstance(y, Tensor):
            y = self._number(y, x)
        elif not isinstance(x, Tensor):
            x = self._number(x, y)
        return torch.where(condition, x, y)

    def _number(self, number: Any, like: Any) -> Any:
        """`number` as a 0-d tensor of the dtype of `like`, or unchanged where that is not safe."""
        if isinstance(like, Tensor) and like.dtype in _KINDS.get(type(number), ()):
            return self._constant(number, like.dtype, like.device)
        return number

    def _constant(self, number: Any, dtype: torch.dtype, device: torch.device) -> Any:
        """A 0-d tensor; in a compiled step the number itself."""
        if torch.compiler.is_compiling():
            return number
        key = (number, dtype, device)
        if key not in self._numbers:
            self._numbers[key] = torch.full((), number, dtype=dtype, device=device)
        return self._numbers[key]

    def minimum(self, x: Tensor, y: Tensor | Number, /) -> Tensor:
        """`torch.clamp_max`, which also takes a Python number."""
        return torch.clamp_max(x, y)

    def maximum(self, x: Tensor, y: Tensor | Number, /) -> Tensor:
        """`torch.clamp_min`, which also takes a Python number."""
        return torch.clamp_min(x, y)

    def clip(self, x: Tensor, low: float, high: float, /) -> Tensor:
        """`torch.clamp`."""
        return torch.clamp(x, low, high)

    def abs(self, x: Tensor, /) -> Tensor:
        """`torch.abs`."""
        return torch.abs(x)

    def sqrt(self, x: Tensor, /) -> Tensor:
        """Square root, correctly rounded in float32 as in NumPy and XLA.

        Computed in float64: its 53 bits exceed 2 * 24 + 2, so rounding twice equals rounding once.
        On a CPU `torch.sqrt` in float32 (MKL's VML) differs by one ulp in 17 % of cases.
        """
        if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
            return torch.sqrt(x.to(torch.float64)).to(torch.float32)
        return torch.sqrt(x)

    def sum(self, x: Tensor, axis: int) -> Tensor:
        """`torch.sum`."""
        return torch.sum(x, axis)

    def cumsum(self, x: Tensor, axis: int) -> Tensor:
        """`torch.cumsum`."""
        return torch.cumsum(x, axis)

    def astype(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """`torch.Tensor.to`."""
        return x.to(dtype)

    def arange(self, n: int, /) -> Tensor:
        """`torch.arange` on the device."""
        return torch.arange(n, device=self.device)

    def asarray(self, x: Any, /) -> Tensor:
        """The core's only table, `EDGES`, on the device."""
        del x
        return self._edges

    def reciprocal(self, count: Tensor, /) -> Tensor:
        """1 / count in float32: float32 / int32 is float32 in torch, unlike in NumPy."""
        if torch.compiler.is_compiling():
            count = count.to(torch.float32)
        return self._constant(1.0, torch.float32, count.device) / count

    def without_small(self, x: Tensor, limit: float, /) -> Tensor:
        """One operation instead of three."""
        return torch.nn.functional.hardshrink(x, limit)

    def product(self, x: Any, y: Any, /) -> Tensor:
        """A plain product, except in a compiled step: only a compiler fuses it with an addition."""
        if torch.compiler.is_compiling():
            return torch.clamp_max(x * y, PRODUCT_LIMIT)
        return x * y

    def quotient(self, x: Tensor, y: Any, /) -> Tensor:
        """A plain division. torch divides exactly by a tensor, but not by a Python number."""
        divisor = self._number(y, x)
        if not isinstance(divisor, Tensor):
            divisor = torch.full_like(x, divisor)
        return x / divisor

    def flag(self, condition: Tensor, flags: int, /) -> Tensor:
        """One product: a bool times an int32 tensor is int32."""
        bit = condition
        if torch.compiler.is_compiling():
            bit = condition.to(torch.int32)
        return bit * self._constant(int(flags), torch.int32, condition.device)

    def never(self, like: Tensor, /) -> Tensor:
        """A constant without an operation, where the shape allows it."""
        if like.ndim or torch.compiler.is_compiling():
            return like != like
        return self._constant(False, torch.bool, like.device)
