"""Identifies processes, checks whether they still run, and names the versions of a process."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import socket
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import healcore

# Only versions, because command lines and environment variables may contain passwords.
_DISTRIBUTIONS = (
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
    """Identity of a process, distinct from later processes with the same number.

    The number alone is not enough: after a reboot, or on a busy machine after a day, another
    process has it. A run that took such a process for its predecessor would wait for it forever.
    """

    host: str
    pid: int
    boot: str | None
    """The kernel's id of the boot, or None on systems other than Linux."""
    born: int | None
    """Start time in clock ticks since the boot, or None. Distinguishes reused values of `pid`."""

    def gone(self) -> bool | None:
        """Whether the process has ended.

        Returns:
            True if the process has ended or is a zombie, and False if it runs. None if this is
            unknown: the process is on another host, or the system is Windows.
        """
        current = current_process()
        if self.host != current.host:
            return None
        if self.boot != current.boot:
            return True
        if os.name != "posix":  # on Windows `os.kill(pid, 0)` is Ctrl-C
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass
        state, born = _state_and_start(self.pid)
        if state == "Z":
            return True
        if born is None or self.born is None:
            return False
        return born != self.born


def current_process() -> Process:
    """The identity of the calling process."""
    pid = os.getpid()
    _, born = _state_and_start(pid)
    return Process(socket.gethostname(), pid, _boot_id(), born)


@functools.cache
def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _state_and_start(pid: int) -> tuple[str | None, int | None]:
    """The state and the start time of a process, each None on systems without /proc."""
    try:
        # The second field is the program's name in parentheses, which may contain spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    except (OSError, ValueError, IndexError):
        return None, None


@functools.cache
def environment() -> dict[str, str]:
    """The versions that a reader of the events needs to reproduce a run.

    Returns:
        "healcore", "python", "platform" (the operating system) and the name of each installed
        framework -> its version.
    """
    versions = {
        "healcore": healcore.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
