"""Host memory for copies of a state.

All arrays of a copy are in one reused `Arena`. A copy into fresh memory is slower, because of the
first touch of every page (measured: 1.2 GB/s into memory of torch's allocator, 6 GB/s into NumPy's,
9 GB/s into reused memory).
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

_HUGE_PAGE = 2 << 20  # bytes
_MAX_SHARED_BLOCK = 16 << 20  # bytes
_MAX_SHARE_OF_FREE = 0.5
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
"""Copies the bytes of blocks into fresh memory, and checks them."""


class Arena:
    """One block of host memory, divided into pieces whose sizes are rounded up to `ALIGNMENT`."""

    def __init__(self, nbytes: int, allocate: Callable[[int], np.ndarray] | None = None) -> None:
        self._memory = aligned(nbytes, allocate)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Size of the whole block in bytes."""
        return len(self._memory)

    def deal(self, nbytes: int) -> np.ndarray:
        """Allocates the next piece, uint8 (nbytes,), aligned."""
        start = self._next
        self._next = start + rounded(nbytes)
        assert self._next <= self.nbytes, "the arena was planned too small"
        return self._memory[start : start + nbytes]

    @classmethod
    def reusing(
        cls, old: Arena | None, nbytes: int, allocate: Callable[[int], np.ndarray] | None = None
    ) -> Arena:
        """The old arena, emptied, if its size fits; else a new arena."""
        if old is None or not nbytes <= old.nbytes <= 2 * nbytes:
            return cls(nbytes, allocate)
        old._next = 0
        return old


def rounded(nbytes: int) -> int:
    """Bytes that a piece uses in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty(nbytes: int) -> np.ndarray:
    """Fresh memory, uint8 (nbytes,). A large piece starts and ends with a huge page."""
    if nbytes < 2 * _HUGE_PAGE:
        return np.empty(nbytes, np.uint8)
    whole = np.empty((-(-nbytes // _HUGE_PAGE) + 1) * _HUGE_PAGE, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + nbytes]


def allocate_arrays(sizes: Sequence[int]) -> list[np.ndarray]:
    """Fresh aligned memory for arrays that outlive the store, uint8 (n,) each.

    Neighbours share blocks large enough for huge pages: with pages of 4 KB the first touch takes
    several times as long as the copy (measured: 120 against 14 ms for 256 MB). A block lives as
    long as any of its arrays, so its size is limited to `_MAX_SHARED_BLOCK`.
    """
    pieces: list[np.ndarray] = []
    while len(pieces) < len(sizes):
        group, nbytes = [], 0
        for size in sizes[len(pieces) :]:
            if group and nbytes + rounded(size) > _MAX_SHARED_BLOCK:
                break
            group.append(size)
            nbytes += rounded(size)
        block = Arena(nbytes)
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
