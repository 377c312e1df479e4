"""The array namespace of the core in torch.

    state, decision = engine.step(state, signals, xp=Namespace(device))

Every function makes one or two torch calls, because an eager step calls hundreds of functions. All
trace under ``torch.compile(fullgraph=True)``. Rejected: array-api-compat, which breaks the graph in
Dynamo (measured) and keeps torch's inexact `sqrt`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from healcore.core.clipping.global_norm import EDGES
from healcore.core.numerics import LARGEST


def _sqrt(x: Tensor) -> Tensor:
    """Square root, correctly rounded in float32 as in NumPy and XLA.

    Computed in float64: its 53 bits exceed 2 * 24 + 2, so rounding twice equals rounding once. On a
    CPU `torch.sqrt` in float32 (MKL's VML) differs by one ulp in 17 % of cases.
    """
    if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
        return torch.sqrt(x.to(torch.float64)).to(torch.float32)
    return torch.sqrt(x)


_KINDS = {float: (torch.float32,), int: (torch.float32, torch.int32)}
"""Type of a Python number -> dtypes of a tensor with which the number has the same dtype."""


class Namespace:
    """Array functions that create arrays on one device.

    The core's only table is copied to the device once, because a CUDA graph cannot capture a copy
    from the host.
    """

    float32, int32, bool = torch.float32, torch.int32, torch.bool
    abs, clip, reciprocal = torch.abs, torch.clamp, torch.reciprocal
    sum, cumsum = torch.sum, torch.cumsum
    astype, sqrt = staticmethod(Tensor.to), staticmethod(_sqrt)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edges = torch.as_tensor(EDGES).to(device)
        self._numbers: dict[tuple[Any, torch.dtype, torch.device], Tensor] = {}

    def where(self, condition: Tensor, x: Any, y: Any) -> Tensor:
        """`torch.where`; a Python number becomes a tensor once, and not at every call."""
        if not isinstance(y, Tensor):
            y = self._number(y, x)
        elif not isinstance(x, Tensor):
            x = self._number(x, y)
        return torch.where(condition, x, y)

    def _number(self, number: Any, like: Any) -> Any:
        """`number` as a 0-d tensor of the dtype of `like`, or unchanged where that is not safe."""
        if (
            not isinstance(like, Tensor)
            or like.dtype not in _KINDS.get(type(number), ())
            or torch.compiler.is_compiling()
            or (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
        ):
            return number
        key = number, like.dtype, like.device
        if key not in self._numbers:
            self._numbers[key] = torch.full((), number, dtype=like.dtype, device=like.device)
        return self._numbers[key]

    @staticmethod
    def isfinite(x: Tensor) -> Tensor:
        """`torch.isfinite` for floats, with half of its operations."""
        return torch.abs(x) < math.inf

    @staticmethod
    def minimum(x: Any, y: Any) -> Tensor:
        """Elementwise minimum; one side may be a Python number."""
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.minimum(x, y)
        return torch.clamp_max(x, y) if isinstance(x, Tensor) else torch.clamp_max(y, x)

    @staticmethod
    def maximum(x: Any, y: Any) -> Tensor:
        """Elementwise maximum; one side may be a Python number."""
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return torch.maximum(x, y)
        return torch.clamp_min(x, y) if isinstance(x, Tensor) else torch.clamp_min(y, x)

    @staticmethod
    def without_small(x: Tensor, limit: float) -> Tensor:
        """See `numerics`."""
        return torch.nn.functional.hardshrink(x, limit)

    @staticmethod
    def rounded_product(x: Any, y: Any) -> Tensor:
        """See `numerics`. Only a compiler fuses a product with an addition."""
        return torch.clamp_max(x * y, LARGEST) if torch.compiler.is_compiling() else x * y

    def quotient(self, x: Tensor, y: Any) -> Tensor:
        """See `numerics`. torch divides exactly by a tensor, but not by a Python number."""
        divisor = self._number(y, x)
        return x / (divisor if isinstance(divisor, Tensor) else torch.full_like(x, divisor))

    def arange(self, n: int) -> Tensor:
        """0, 1, ... n - 1 on the device."""
        return torch.arange(n, device=self.device)

    def asarray(self, x: Any) -> Tensor:
        """The core's only table, `EDGES`, on the device."""
        del x
        return self._edges
