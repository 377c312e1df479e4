"""Is every number in these bytes finite? One pass over raw memory, for every float there is.

A number with sign, exponent and fraction is NaN or Inf exactly if its exponent is all ones, so the
bits without the sign, read as an integer, are at least the pattern of infinity. That needs neither
NumPy's nor a framework's idea of bfloat16, raises no warnings and allocates nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

CHUNK = 1 << 18
"""Bytes at a time: few enough to stay in a core's own cache."""


class _Layout(NamedTuple):
    """How to read a format's bits."""

    unsigned: type[np.unsignedinteger]
    signed: type[np.signedinteger] | None
    """None of a format without a sign."""
    infinity: int
    """The smallest magnitude that is not finite."""

    @property
    def minus_infinity(self) -> int:
        """The same with the sign, read without one."""
        return self.infinity | 1 << 8 * self.unsigned().nbytes - 1


_HALF = _Layout(np.uint16, np.int16, 0x7C00)
_SINGLE = _Layout(np.uint32, np.int32, 0x7F80_0000)
_DOUBLE = _Layout(np.uint64, np.int64, 0x7FF0_0000_0000_0000)

_LAYOUTS = {
    "float16": _HALF,
    "bfloat16": _Layout(np.uint16, np.int16, 0x7F80),
    "float32": _SINGLE,
    "float64": _DOUBLE,
    "complex32": _HALF,
    "complex64": _SINGLE,
    "complex128": _DOUBLE,
    "float8_e3m4": _Layout(np.uint8, np.int8, 0x70),
    "float8_e4m3": _Layout(np.uint8, np.int8, 0x78),
    "float8_e5m2": _Layout(np.uint8, np.int8, 0x7C),
    "float8_e4m3fn": _Layout(np.uint8, np.int8, 0x7F),  # no Inf, one NaN
    "float8_e8m0fnu": _Layout(np.uint8, None, 0xFF),  # no sign, no Inf, one NaN
}
# In these NaN has the bits of minus zero.
_NAN_IS_MINUS_ZERO = {"float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"}
# Anything else (whole numbers, bool, 4-bit and 6-bit floats) has no NaN and no Inf.


def finite(raw: np.ndarray, dtype: str) -> bool:
    """Whether an array holds neither NaN nor Inf.

    Args:
        raw: uint8 (n,), the array's bytes, contiguous.
        dtype: name of its dtype as NumPy, ml_dtypes and torch have it, for example "bfloat16".
    """
    return all(finite_chunk(raw[at : at + CHUNK], dtype) for at in range(0, len(raw), CHUNK))


def finite_chunk(raw: np.ndarray, dtype: str) -> bool:
    """`finite`, for bytes that fit into a cache; whole numbers of elements."""
    if dtype in _NAN_IS_MINUS_ZERO:
        return not bool((raw == 0x80).any())
    layout = _LAYOUTS.get(dtype)
    if layout is None or not len(raw):
        return True
    # Two maxima: as signed numbers the positive ones count, as unsigned numbers the negative ones.
    # Not one over the bits without the sign: those need memory of their own, and fetching that
    # anew for every piece takes longer than the check.
    bits = raw.view(layout.unsigned)
    if layout.signed is None:
        return bool(bits.max() < layout.infinity)
    positive, negative = bits.view(layout.signed).max(), bits.max()
    return bool(positive < layout.infinity and negative < layout.minus_infinity)
