"""Host memory for copies of a state.

All arrays of a copy are in one `Arena`. Fresh memory for each array would cost more than the copy,
for the first touch of every page (measured: 1.2 GB/s with torch's allocator, 6 with NumPy's, 9 into
memory used before).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ALIGNMENT = 64
"""Bytes: a cache line, and the alignment that XLA needs to use memory without a copy."""

_HUGE = 2 << 20
"""Bytes of a huge page."""
_SHARED = 16 << 20
_SHARE_OF_FREE = 0.5
"""The rest of the free memory is for data loaders, the page cache and the next allocation."""


class Block(NamedTuple):
    """The bytes of one array, or of one part of an array."""

    name: str
    dtype: str
    raw: np.ndarray
    """uint8 (n,), contiguous."""
    part: str = ""
    """Name of the part; empty for the whole array."""

    @property
    def key(self) -> str:
        """Unique among the blocks of a snapshot."""
        return self.name + self.part


CopyBlocks = Callable[[Sequence[Block]], list[np.ndarray]]
"""Makes fresh copies of the bytes of blocks, and checks them."""


class Arena:
    """One block of host memory, divided into pieces whose sizes are rounded up to `ALIGNMENT`."""

    def __init__(self, nbytes: int, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        self._memory = aligned(nbytes, allocate)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Size of the whole block."""
        return len(self._memory)

    def deal(self, nbytes: int) -> np.ndarray:
        """The next piece, uint8 (nbytes,), aligned."""
        start = self._next
        self._next = start + rounded(nbytes)
        assert self._next <= self.nbytes, "the arena was planned too small"
        return self._memory[start : start + nbytes]

    @classmethod
    def reusing(
        cls, old: Arena | None, nbytes: int, allocate: Callable[[int], np.ndarray] | None = None
    ) -> Arena:
        """The old arena without its blocks if its size fits, or a new arena."""
        if old is None or not nbytes <= old.nbytes <= 2 * nbytes:
            return cls(nbytes, allocate)
        old._next = 0
        return old


def rounded(nbytes: int) -> int:
    """Bytes that a piece uses in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty(nbytes: int) -> np.ndarray:
    """Fresh memory, uint8. NumPy asks for huge pages; a large piece starts and ends with one."""
    if nbytes < 2 * _HUGE:
        return np.empty(nbytes, np.uint8)
    whole = np.empty((-(-nbytes // _HUGE) + 1) * _HUGE, np.uint8)
    start = -whole.ctypes.data % _HUGE
    return whole[start : start + nbytes]


def fresh(sizes: Sequence[int]) -> list[np.ndarray]:
    """Fresh aligned memory for arrays that outlive the store, uint8 (n,) each.

    Neighbours share blocks large enough for huge pages: with pages of 4 KB the first touch takes
    several times as long as the copy (measured: 120 against 14 ms for 256 MB). A block lives as
    long as one of its arrays, so a larger block would keep more memory for one survivor.
    """
    pieces: list[np.ndarray] = []
    while len(pieces) < len(sizes):
        group, need = [], 0
        for size in sizes[len(pieces) :]:
            if group and need + rounded(size) > _SHARED:
                break
            group.append(size)
            need += rounded(size)
        block = Arena(need)
        pieces += [block.deal(size) for size in group]
    return pieces


def aligned(nbytes: int, allocate: Callable[[int], np.ndarray] | None = None) -> np.ndarray:
    """Fresh aligned memory, uint8 (nbytes,)."""
    whole = (allocate or empty)(nbytes + ALIGNMENT)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def fits(copies: int, nbytes: int, processes: int = 1) -> bool:
    """Whether the copies of all processes fit into half of the free memory; True if unknown."""
    # The smaller of the free memory of the machine and of the container.
    free = [found for found in (_of_machine(), _of_container()) if found is not None]
    return copies * nbytes * processes <= _SHARE_OF_FREE * min(free, default=math.inf)


def _of_machine() -> int | None:
    """Free bytes of the machine, or None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # not Linux: all memory, which is more than the free memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _of_container() -> int | None:
    """Free bytes of the container (cgroup v2), or None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None
