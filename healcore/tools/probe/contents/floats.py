"""Small floats as float32, exactly, without a framework."""

from __future__ import annotations

import numpy as np

_NUMPY = {
    "float16", "float32", "float64", "complex64", "complex128", "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}  # fmt: skip


def widened(raw: np.ndarray, dtype: str) -> np.ndarray:
    """The elements in an array's bytes, of a dtype that NumPy can compare and add.

    Args:
        raw: uint8 (n,), little-endian.
        dtype: name of the array's dtype.

    Raises:
        ValueError: a dtype that is not known here.
    """
    if dtype == "bfloat16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e5m2":
        return (raw.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "float8_e4m3fn":
        return _e4m3fn()[raw]
    if dtype == "float8_e8m0fnu":  # a power of two; 255 is NaN
        return np.where(raw == 255, np.nan, np.exp2(raw.astype(np.float64) - 127)).astype(
            np.float32
        )
    if dtype in _NUMPY:
        return raw.view(np.dtype(dtype).newbyteorder("<"))
    raise ValueError(f"arrays of {dtype} cannot be read here")


def _e4m3fn() -> np.ndarray:
    """Every value of it, float32 (256,): 4 bits of exponent, 3 of fraction, no Inf, one NaN."""
    bits = np.arange(256)
    exponent, fraction = bits >> 3 & 15, (bits & 7) / 8
    normal = np.where(exponent > 0, 1 + fraction, fraction)
    values = np.where(bits >> 7, -1, 1) * normal * 2.0 ** (np.maximum(exponent, 1) - 7)
    return np.where((bits & 127) == 127, np.nan, values).astype(np.float32)
