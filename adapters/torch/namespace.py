"""The array namespace that the core runs on under torch, with the functions that it uses.

    state, decision = engine.step(state, signals, xp=namespace)             # CPU
    state, decision = engine.step(state, signals, xp=namespace.on(device))  # arrays made on it

Every function is one or two torch calls (an eager step has hundreds, so a microsecond counts) and
traces under ``torch.compile(fullgraph=True)``. Rejected: array-api-compat, which breaks the graph
in Dynamo (measured) and keeps torch's inexact `sqrt`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from healcore.core.clipping.autoclip import EDGES

float32, int32, bool = torch.float32, torch.int32, torch.bool
abs, isfinite = torch.abs, torch.isfinite
where = torch.where
"""Takes Python numbers; torch fills them in on the condition's device, without the host."""


def sqrt(x: Tensor) -> Tensor:
    """Square root, correctly rounded in float32 as in NumPy and XLA.

    Through float64: with 53 bits, more than 2 * 24 + 2, rounding twice is rounding once. On a CPU
    `torch.sqrt` in float32 (MKL's VML) is one ulp off in 17 % of cases.
    """
    if x.dtype == torch.float32 and x.device.type != "mps":  # MPS has no float64
        return torch.sqrt(x.to(torch.float64)).to(torch.float32)
    return torch.sqrt(x)


def astype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype."""
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
    """This namespace with `arange` and `asarray` on one device.

    The core's only table is copied there once: a CUDA graph cannot capture a copy from the host.
    """

    float32, int32, bool = float32, int32, bool
    abs, isfinite, where = abs, isfinite, where
    sqrt, astype = staticmethod(sqrt), staticmethod(astype)
    sum, cumsum = staticmethod(sum), staticmethod(cumsum)

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._edges = torch.as_tensor(EDGES).to(device)

    def arange(self, n: int, dtype: torch.dtype | None = None) -> Tensor:
        """0, 1, ... n - 1 on the device."""
        return torch.arange(n, dtype=dtype, device=self.device)

    def asarray(self, x: Any, dtype: torch.dtype | None = None) -> Tensor:
        """`x` as a tensor on the device, copied there without a sync."""
        if x is EDGES and dtype is None:
            return self._edges
        return torch.as_tensor(x, dtype=dtype).to(self.device, non_blocking=True)

    def __repr__(self) -> str:
        return f"healcore.torch.namespace.on({str(self.device)!r})"


def on(device: torch.device | str | None) -> Any:
    """The namespace for arrays on `device`."""
    return Placed(torch.device("cpu" if device is None else device))
