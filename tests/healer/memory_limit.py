"""A limit of the kernel on a process's memory."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Allows the process that many bytes more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text()
    used = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)
