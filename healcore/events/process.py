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
from typing import NamedTuple, Protocol

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


FORK_WAIT = 1.0
"""Seconds that a fork waits for each watched object that is at work (see `watch_forks`)."""


class ForkWatcher(Protocol):
    """An object with locks or threads, which a forked child has to reset.

    It may also have a method `join(seconds)`, which waits until its threads are idle.
    """

    def forked(self) -> None:
        """Resets the object in a forked child, in which its threads do not exist."""
        ...


_watched: weakref.WeakSet[ForkWatcher] = weakref.WeakSet()


def watch_forks(target: ForkWatcher) -> None:
    """Resets an object in each later forked child, without keeping the object alive.

    A forked child inherits locks but not the threads that hold them. Data loaders fork their
    workers while a save is in progress: without a reset, a worker would wait forever for the save.
    No reset frees the locks of libc and torch. So a fork first waits until the threads are idle:

        parent:  target.join(FORK_WAIT) ── fork ── continues, its threads run
                                             │
        child:                               └──── target.forked() ── continues, without threads

    Args:
        target: its `forked()` is called in the child. Its `join(FORK_WAIT)` is called before the
            fork if the target has a `join`. The target has to be hashable.
    """
    _watched.add(target)


def _wait_before_fork() -> None:
    for target in list(_watched):
        join = getattr(target, "join", None)
        if join is not None:
            join(FORK_WAIT)


def _reset_after_fork() -> None:
    for target in list(_watched):
        target.forked()


# The hooks before a fork run the newest first. `concurrent.futures.thread` has a hook that takes a
# lock, which a save needs to start threads. Its import above registers that hook before this one.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_wait_before_fork, after_in_child=_reset_after_fork)
