"""Array namespace for one engine on the host, faster than NumPy for scalars.

`numpy.where` on two scalars takes a microsecond and a Python conditional a tenth of it; a decision
needs about 250. NumPy's `astype` and `isfinite` take ten times as long as arithmetic on scalars.
Values and dtypes equal NumPy's. Arrays with axes (windows, histograms) go to NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

float32, int32 = np.float32, np.int32
bool = np.bool_
arange, cumsum, asarray = np.arange, np.cumsum, np.asarray

MAX = np.float32(np.finfo(np.float32).max)
ZERO, ONE = np.float32(0), np.float32(1)


def where(condition: Any, a: Any, b: Any) -> Any:
    """`numpy.where`; a Python number takes the dtype of the other operand."""
    kind, other = type(a), type(b)
    if isinstance(condition, np.ndarray) or kind is np.ndarray or other is np.ndarray:
        return np.where(condition, a, b)
    if condition:
        return a if kind is other or issubclass(kind, np.generic) else other(a)
    return b if kind is other or issubclass(other, np.generic) else kind(b)


def minimum(a: Any, b: Any) -> Any:
    """`numpy.minimum`; a Python number takes the dtype of the other operand."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.minimum(a, b)
    return _as(a, b) if a < b or a != a else _as(b, a)


def maximum(a: Any, b: Any) -> Any:
    """`numpy.maximum`; a Python number takes the dtype of the other operand."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return np.maximum(a, b)
    return _as(a, b) if a > b or a != a else _as(b, a)


def clip(x: Any, low: float, high: float) -> Any:
    """`numpy.clip` between two Python numbers."""
    return np.clip(x, low, high) if isinstance(x, np.ndarray) else maximum(minimum(x, high), low)


def _as(x: Any, other: Any) -> Any:
    kind = type(x)
    return x if kind is type(other) or issubclass(kind, np.generic) else type(other)(x)


def reciprocal(x: Any) -> Any:
    """`numpy.reciprocal` for float32."""
    return ONE / x


def isfinite(x: Any) -> Any:
    """`numpy.isfinite` for float32."""
    if isinstance(x, np.ndarray):
        return np.isfinite(x)
    return x.__abs__() <= MAX  # False for NaN


def abs(x: Any) -> Any:
    """`numpy.abs`."""
    return np.abs(x) if isinstance(x, np.ndarray) else x.__abs__()


def sqrt(x: Any) -> Any:
    """`numpy.sqrt`, correctly rounded."""
    return np.sqrt(x)


def rounded_product(a: Any, b: Any) -> Any:
    """See `numerics`: NumPy rounds a product by itself."""
    return a * b


def sum(x: Any, axis: int) -> Any:
    """`numpy.sum`."""
    return x.sum(axis=axis)


def astype(x: Any, dtype: Any) -> Any:
    """`numpy.astype`."""
    if type(x) is int32 and dtype is float32:
        return ZERO + float(x)  # rounds once, because every int32 is a Python float
    return x.astype(dtype)


def with_slot(values: Any, slot: Any, value: Any) -> Any:
    """See `numerics.with_slot`. Returns `values` itself if the slot has this value already."""
    if values[slot] != value:
        values = values.copy()
        values[slot] = value
    return values
