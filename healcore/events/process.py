"""Identifies processes, checks whether they still run, and resets objects in forked children."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 -- its hook has to be older than the one below
import contextlib
import functools
import os
import platform
import socket
import weakref
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import healcore

# Only versions, because command lines and environment variables may contain passwords.
_NAMES = "numpy torch jax jaxlib optax flax orbax-checkpoint torchdata grain transformers lightning"


class Process(NamedTuple):
    """Identity of a process, distinct from later processes with the same number."""

    host: str
    pid: int
    boot: str | None  # the kernel's id of the boot, or None on systems other than Linux
    born: int | None
    """Start time in clock ticks since the boot, or None. Distinguishes reused values of `pid`."""

    def gone(self) -> bool | None:
        """Whether the process has ended or is a zombie, or None if unknown, as on another host."""
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
        return state == "Z" or (None not in (born, self.born) and born != self.born)


def current_process() -> Process:
    """The identity of the calling process."""
    pid = os.getpid()
    return Process(socket.gethostname(), pid, _boot_id(), _state_and_start(pid)[1])


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
    """Name -> version of healcore, Python, the system and the installed frameworks."""
    versions = {"healcore": healcore.__version__, "python": platform.python_version()}
    versions["platform"] = platform.platform()
    for name in _NAMES.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


FORK_WAIT = 1.0
"""Seconds that a fork waits for each watched object that is at work (see `watch_forks`)."""

_watched: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_forks(target: Any) -> None:
    """Calls `target.forked()` in each later forked child, without keeping `target` alive.

    A forked child inherits locks but not the threads that hold them. Data loaders fork their
    workers while a save is in progress: without a reset, a worker would wait forever for the save.
    No reset frees the locks of libc and torch. So a fork first calls `target.join(FORK_WAIT)`, if
    the target has a `join`.
    """
    _watched.add(target)


# The hooks before a fork run the newest first. `concurrent.futures.thread` has a hook that takes a
# lock, which a save needs to start threads. Its import above registers that hook before this one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: [each.join(FORK_WAIT) for each in list(_watched) if hasattr(each, "join")],
        after_in_child=lambda: [target.forked() for target in list(_watched)],
    )
