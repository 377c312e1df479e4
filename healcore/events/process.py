"""Identifies a process, checks whether it still runs, and lists the installed versions."""

from __future__ import annotations

import functools
import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import healcore

# Versions only: the command line and environment variables may contain passwords.
_PACKAGES = (
    "numpy",
    "torch",
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "orbax-checkpoint",
    "torchdata",
    "grain",
    "transformers",
    "lightning",
)


class Process(NamedTuple):
    """A process, distinct from later processes with the same number."""

    host: str
    pid: int
    boot: str | None
    """The kernel's id of this boot; None on systems without one (not Linux)."""
    born: int | None
    """Clock ticks from the boot to its start, or None. In a container `pid` may repeat."""

    def gone(self) -> bool | None:
        """Whether it has ended, or None if that is not visible, such as on another host."""
        me = current_process()
        if self.host != me.host:
            return None
        if self.boot != me.boot:
            return True
        gone = pid_gone(self.pid)
        if gone is not False:
            return gone
        born = _stat(self.pid)[1]
        return None not in (born, self.born) and born != self.born


def current_process() -> Process:
    """This process."""
    pid = os.getpid()
    return Process(socket.gethostname(), pid, _boot(), _stat(pid)[1])


def pid_gone(pid: int) -> bool | None:
    """Whether no process has the number, except a zombie. None if unknown."""
    if os.name != "posix":  # on Windows `os.kill(pid, 0)` is Ctrl-C
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    # A zombie has ended and waits for its parent to read the status.
    return _stat(pid)[0] == "Z"


@functools.cache
def machine() -> str:
    """Host name and machine id, the same across boots."""
    try:
        machine_id = Path("/etc/machine-id").read_text().strip()
    except OSError:
        machine_id = ""
    return f"{socket.gethostname()}\n{machine_id}"


@functools.cache
def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _stat(pid: int) -> tuple[str | None, int | None]:
    """State and start time of a process, or None on systems without /proc."""
    try:
        # The second field is the program's name in brackets, and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None, None


def environment() -> dict[str, str]:
    """Versions of healcore, Python, the system, and the installed frameworks, by name."""
    return {
        "healcore": healcore.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **_package_versions(),
    }


@functools.cache
def _package_versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
