"""Which process wrote something, and whether it is still there."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, told apart from every later one with the same number."""

    host: str
    pid: int
    boot: str | None
    """The kernel's id of this boot; None where there is none (not Linux)."""
    born: int | None
    """Clock ticks from the boot to its start: numbers are used again, and in a container every run
    may have the same one."""

    def gone(self) -> bool | None:
        """Whether it has ended. None: that cannot be seen from here; it ran on another host."""
        me = here()
        if self.host != me.host:
            return None
        if self.boot != me.boot:
            return True
        if os.name != "posix":  # on Windows `os.kill(pid, 0)` is Ctrl-C
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        state, born = _stat(self.pid)
        # A zombie has been killed and only waits for its parent to ask: it writes nothing more.
        return state == "Z" or (None not in (born, self.born) and born != self.born)


def here() -> Process:
    """This process."""
    pid = os.getpid()
    return Process(socket.gethostname(), pid, _boot(), _stat(pid)[1])


@functools.cache
def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _stat(pid: int) -> tuple[str | None, int | None]:
    """State and start of a process; None where the system does not tell."""
    try:
        # The name of the program comes second, in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None, None
