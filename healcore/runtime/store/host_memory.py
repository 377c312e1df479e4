"""Bytes in host memory: allocation, and checks for NaN and Inf."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import numpy as np

_PIECE_BYTES = 1 << 19
"""Size of a piece in bytes. It stays in a core's cache, so a second read of it costs no memory
bandwidth."""
_CACHE_LINE_BYTES = 64
"""Size of a cache line in bytes, and the alignment that XLA needs to use memory without a copy."""
_HUGE_PAGE_BYTES = 2 << 20
"""Size of a huge page in bytes. With pages of 4 KB the first touch takes several times as long as
the copy."""


def allocate(nbytes: int) -> np.ndarray:
    """Allocates aligned memory for an array. A large array begins with a huge page.

    Args:
        nbytes: number of bytes.

    Returns:
        Fresh memory, uint8 (nbytes,), not set to anything.
    """
    alignment = _CACHE_LINE_BYTES
    if nbytes >= 2 * _HUGE_PAGE_BYTES:
        alignment = _HUGE_PAGE_BYTES
    whole = np.empty(nbytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    return whole[start : start + nbytes]


def free_bytes() -> float:
    """Free memory of the machine or of its container.

    In a container the limit of the container counts: the kernel kills a process that exceeds it,
    however much memory the machine has.

    Returns:
        Bytes, or infinity if it is unknown.
    """
    found: float = math.inf
    with suppress(AttributeError, OSError, ValueError):  # all memory is an upper bound
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):  # Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = min(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # cgroup v2; the limit "max" is no number
        container = Path("/sys/fs/cgroup")
        limit = int((container / "memory.max").read_text())
        found = min(found, limit - int((container / "memory.current").read_text()))
    return found


_INFINITY = {
    "float16": (2, 0x7C00),
    "bfloat16": (2, 0x7F80),
    "float32": (4, 0x7F80_0000),
    "float64": (8, 0x7FF0_0000_0000_0000),
    "complex32": (2, 0x7C00),
    "complex64": (4, 0x7F80_0000),
    "complex128": (8, 0x7FF0_0000_0000_0000),
    "float8_e3m4": (1, 0x70),
    "float8_e4m3": (1, 0x78),
    "float8_e5m2": (1, 0x7C),
    "float8_e4m3fn": (1, 0x7F),
}
"""Format -> size of a number in bytes, and the bits of infinity. `float8_e4m3fn` has no Inf: its
bits are the bits of its one NaN. All other formats (integers, bool,
4-bit and 6-bit floats) have no NaN and no Inf."""
_NAN = {
    "float8_e4m3fnuz": 0x80,
    "float8_e5m2fnuz": 0x80,
    "float8_e4m3b11fnuz": 0x80,
    "float8_e8m0fnu": 0xFF,
}
"""Format of one byte without Inf -> the bits of its only NaN."""


def finite(raw: np.ndarray, dtype: str) -> bool:
    """Whether an array's bytes, uint8 (n,), hold no NaN or Inf; `dtype` is a name: "bfloat16".

    A number is NaN or Inf exactly if all bits of its exponent are ones. The bits without the sign,
    as an integer, are then at least the bits of infinity. This test needs no bfloat16 type, raises
    no warnings and allocates nothing.
    """
    if dtype not in _NAN and dtype not in _INFINITY:
        return True
    for at in range(0, len(raw), _PIECE_BYTES):
        piece = raw[at : at + _PIECE_BYTES]
        if dtype in _NAN:
            if (piece == _NAN[dtype]).any():
                return False
            continue
        # Two maxima: the signed maximum finds positive numbers, the unsigned one negative numbers.
        # One maximum over the bits without the sign would need fresh memory, which takes longer.
        size, infinity = _INFINITY[dtype]
        positive, negative = piece.view(f"i{size}").max(), piece.view(f"u{size}").max()
        if positive >= infinity or negative >= infinity | 1 << 8 * size - 1:
            return False
    return True
