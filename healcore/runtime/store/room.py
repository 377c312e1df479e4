"""Whether snapshots fit into host memory. A healer that gets the run killed for memory is none."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE = 0.5
"""Of what is free now. The rest is for the data loaders, the page cache and the next allocation."""


def free_memory() -> int | None:
    """Bytes of host memory that this process could still take; None where the system does not tell.

    The smaller of what the machine has left and what the container's limit (cgroup v2) leaves.
    """
    found = [bytes_ for bytes_ in (_of_machine(), _of_container()) if bytes_ is not None]
    return min(found, default=None)


def fits(copies: int, nbytes: int, processes: int = 1) -> bool:
    """Whether so many copies may be held. True where the system does not tell.

    Args:
        copies: of the state, per process.
        nbytes: of one.
        processes: on this machine, each with its own.
    """
    free = free_memory()
    return free is None or copies * nbytes * processes <= _SHARE * free


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
