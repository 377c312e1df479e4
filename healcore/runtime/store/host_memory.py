"""Host memory for copies of a state.

A copy lies in an `Arena`, one block of memory for the whole state, because a fresh allocation per
array costs more than the copy itself, for the first touch of every page (measured: 1.2 GB/s with
torch's allocator, 6 with NumPy's, 9 into memory used before).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ALIGNMENT = 64
"""Bytes. A cache line, and what XLA asks for to use memory as it is."""

_HUGE = 2 << 20
"""Bytes of a huge page."""
_SHARED = 16 << 20
_SHARE_OF_FREE = 0.5
"""Of the free memory. The rest is for data loaders, the page cache and the next allocation."""


class Block(NamedTuple):
    """The bytes of one array, or of one part of it."""

    name: str
    dtype: str
    raw: np.ndarray
    """uint8 (n,), contiguous."""
    part: str = ""
    """Which part; empty for the whole array."""

    @property
    def key(self) -> str:
        """Unique among the blocks of a snapshot."""
        return self.name + self.part


CopyBlocks = Callable[[Sequence[Block]], list[np.ndarray]]
"""Makes fresh copies of the bytes of blocks, and checks them."""


class Arena:
    """One block of host memory, given out in pieces that are rounded up to `ALIGNMENT`."""

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

    def reused(self, nbytes: int) -> bool:
        """Starts from the beginning again if the size suits `nbytes`; returns whether it does."""
        if not nbytes <= self.nbytes <= 2 * nbytes:
            return False
        self._next = 0
        return True


def rounded(nbytes: int) -> int:
    """Bytes that a piece takes up in an arena."""
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

    Neighbours share blocks large enough for huge pages: touched 4 KB at a time, memory takes
    several times as long as the copy into it (measured: 120 against 14 ms for 256 MB). A block
    lives as long as one of its arrays, so larger blocks would keep more memory for one survivor.
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
    """Fresh aligned memory of its own, uint8."""
    whole = (allocate or empty)(nbytes + ALIGNMENT)
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + nbytes]


def fits(copies: int, nbytes: int, processes: int = 1) -> bool:
    """Whether so many copies in each process fit into half of the free memory; True if unknown."""
    free = free_memory()
    return free is None or copies * nbytes * processes <= _SHARE_OF_FREE * free


def free_memory() -> int | None:
    """Bytes left in machine and container (cgroup v2), the smaller; None if not reported."""
    found = [bytes_ for bytes_ in (_of_machine(), _of_container()) if bytes_ is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:  # not Linux: all there is, which is too much, and better than nothing
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _of_container() -> int | None:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return None if limit == "max" else max(int(limit) - used, 0)
    except (OSError, ValueError):
        return None
