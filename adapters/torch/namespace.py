"""The array namespace that the core runs on under torch: `engine.step(..., xp=namespace)`.

torch differs from NumPy: `torch.minimum` takes no Python number, reductions take `dim`, and the CPU
`sqrt` is one ulp off in a sixth of all cases. This module closes those gaps and does nothing else.
Every function is one or two torch calls (an eager scalar step is hundreds of them, so a
microsecond counts) and traces under ``torch.compile(fullgraph=True)``.

    from healcore.torch import namespace
    state, decision = engine.step(state, signals, xp=namespace)             # CPU
    state, decision = engine.step(state, signals, xp=namespace.on(device))  # arrays made on it

array-api-compat is not used here: resolving a namespace through it breaks the graph in Dynamo
(measured), and it keeps torch's `sqrt`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

float32 = torch.float32
float64 = torch.float64
int32 = torch.int32
int64 = torch.int64
bool = torch.bool
inf = float("inf")
nan = float("nan")

abs = torch.abs
isfinite = torch.isfinite
isnan = torch.isnan
isinf = torch.isinf
zeros_like = torch.zeros_like
ones_like = torch.ones_like
full_like = torch.full_like
logical_and = torch.logical_and
logical_or = torch.logical_or
logical_not = torch.logical_not
where = torch.where
"""Takes Python numbers; torch fills them in on the condition's device, without the host."""


def minimum(x: Any, y: Any) -> Tensor:
    """Elementwise smaller one, NaN if either is; either may be a Python number."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.minimum(x, y)
    return torch.clamp(x, max=y) if isinstance(x, Tensor) else torch.clamp(y, max=x)


def maximum(x: Any, y: Any) -> Tensor:
    """Elementwise larger one, NaN if either is; either may be a Python number."""
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.maximum(x, y)
    return torch.clamp(x, min=y) if isinstance(x, Tensor) else torch.clamp(y, min=x)


def sqrt(x: Tensor) -> Tensor:
    """Square root, correctly rounded in float32 as NumPy's and XLA's are.

    Through float64: its 53 bits are more than 2 * 24 + 2, so rounding twice is rounding once.
    `torch.sqrt` in float32 goes through MKL's VML on a CPU and is one ulp off in 17 % of cases.
    """
    if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
        return torch.sqrt(x.to(torch.float64)).to(torch.float32)
    return torch.sqrt(x)


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype; itself when it has that dtype already."""
    return x.to(dtype)


def sum(x: Tensor, axis: int = -1) -> Tensor:
    """Sum along one axis. Integers and booleans add up in int64, as in NumPy."""
    return torch.sum(x, dim=axis)


def cumsum(x: Tensor, axis: int = -1) -> Tensor:
    """Running sum along one axis."""
    return torch.cumsum(x, dim=axis)


def asarray(x: Any, dtype: torch.dtype | None = None) -> Tensor:
    """`x` as a tensor on the CPU; a tensor stays where it is."""
    return torch.as_tensor(x, dtype=dtype)


def arange(n: int, dtype: torch.dtype | None = None) -> Tensor:
    """0, 1, ... n - 1 on the CPU; see `on` for other devices."""
    return torch.arange(n, dtype=dtype)


class Placed:
    """This namespace with `arange` and `asarray` on one device. Build it with `on`."""

    float32, float64, int32, int64, bool = float32, float64, int32, int64, bool
    inf, nan = inf, nan
    abs, isfinite, isnan, isinf = abs, isfinite, isnan, isinf
    zeros_like, ones_like, full_like = zeros_like, ones_like, full_like
    logical_and, logical_or, logical_not = logical_and, logical_or, logical_not
    where, minimum, maximum = where, staticmethod(minimum), staticmethod(maximum)
    sqrt, astype = staticmethod(sqrt), staticmethod(astype)
    sum, cumsum = staticmethod(sum), staticmethod(cumsum)

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def arange(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """0, 1, ... n - 1 on the device."""
        return torch.arange(n, dtype=dtype, device=self.device)

    def asarray(self, x: Any, dtype: torch.dtype | None = None) -> Tensor:
        """`x` as a tensor on the device; a constant of the core is copied there without a wait."""
        return torch.as_tensor(x, dtype=dtype).to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        return f"healcore.torch.namespace.on({str(self.device)!r})"


def on(device: torch.device | str | None) -> Any:
    """The namespace for arrays on `device`."""
    return Placed(torch.device("cpu" if device is None else device))
