"""Host memory for copies of a state.

A copy into fresh memory is slower than into used memory, because of the first touch of every page
(measured: 1.2 GB/s into memory of torch's allocator, 6 GB/s into NumPy's, 9 GB/s into used memory).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, and the alignment that XLA needs to use memory without a copy."""

_HUGE_PAGE = 2 << 20  # bytes
_MAX_SHARED_BLOCK = 16 << 20  # bytes
_MAX_SHARE_OF_FREE = 0.5
"""The rest of the free memory is for data loaders, the page cache and the next allocation."""


def _block(nbytes: int) -> np.ndarray:
    """Fresh memory, uint8 (nbytes,). A large block starts and ends with a huge page."""
    if nbytes < 2 * _HUGE_PAGE:
        return np.empty(nbytes, np.uint8)
    whole = np.empty((-(-nbytes // _HUGE_PAGE) + 1) * _HUGE_PAGE, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + nbytes]


def allocate(sizes: Sequence[int], block: Callable[[int], np.ndarray] = _block) -> list[np.ndarray]:
    """Fresh aligned memory for arrays, uint8 (n,) each.

    Neighbours share blocks large enough for huge pages: with pages of 4 KB the first touch takes
    several times as long as the copy (measured: 120 against 14 ms for 256 MB). A block lives as
    long as any of its arrays, so its size is limited to `_MAX_SHARED_BLOCK`.

    Args:
        sizes: sizes of the arrays in bytes.
        block: allocates one block of some bytes.
    """
    pieces: list[np.ndarray] = []
    while len(pieces) < len(sizes):
        places, nbytes = [], 0
        for index in range(len(pieces), len(sizes)):
            if places and nbytes + sizes[index] > _MAX_SHARED_BLOCK:
                break
            places.append((nbytes, sizes[index]))
            nbytes += -(-sizes[index] // ALIGNMENT) * ALIGNMENT
        whole = block(nbytes + ALIGNMENT)
        first = -whole.ctypes.data % ALIGNMENT
        pieces += [whole[first + at : first + at + size] for at, size in places]
    return pieces


def fits(copies: int, nbytes: int, processes: int = 1) -> bool:
    """Whether the copies of all processes fit into half of the free memory; True if unknown."""
    # The smaller of the free memory of the machine and of the container.
    free = [n for n in (_free_on_machine(), _free_in_container()) if n is not None]
    return copies * nbytes * processes <= _MAX_SHARE_OF_FREE * min(free, default=math.inf)


def _free_on_machine() -> int | None:
    """Free memory in bytes, or None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # not Linux: the size of the memory, an upper bound of the free memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _free_in_container() -> int | None:
    """Free memory in bytes by the limit of the container (cgroup v2), or None for no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None
