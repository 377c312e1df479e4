"""Reserves a directory for one run.

Two runs in one directory would delete each other's checkpoints. `healcore.lock` in the root is
locked (`flock`) as long as the run lasts. The kernel releases the lock when the process ends in any
way, and the lock works between containers.
"""

from __future__ import annotations

import os
import socket
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from healcore.core.errors import clean
from healcore.runtime.store.checkpoints import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "healcore.lock"
_OPEN_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
"""Flags that open the lock file safely if a link or a pipe has just replaced it."""
_QUOTED_BYTES = 300
"""Bytes of the lock file that an error message quotes."""


@dataclass(eq=False, repr=False)
class StoreInUse(StoreError):
    """Another run uses the directory.

    The kernel says so, not the file: a lock file that a killed process has left behind locks
    nothing. So this error is never wrong after a crash.
    """

    root: Path
    """The directory."""
    holder: str
    """The process of the other run, as its lock file names it."""

    def _message(self) -> str:
        return (
            f"{self.root} is in use by another run, {self.holder}. Two runs would delete each "
            "other's checkpoints: end the other run first (in this process: leave its `with` "
            "block), or pass another directory"
        )


StoreInUse.__module__ = "healcore.errors"


class Claim:
    """Reserves a directory until `release`, garbage collection or the end of the process.

    With several ranks, rank 0 claims it.

    Args:
        root: the directory, which exists.

    Raises:
        StoreInUse: another run uses the directory.
        StoreError: `healcore.lock` exists but is not a regular file.
    """

    warning: str | None = None
    """Why another run could use the directory unnoticed, or None: the file system has no locks, or
    `healcore.lock` cannot be written."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        root = Path(root).resolve()
        lock = root / LOCK
        handle = None
        if os.path.lexists(lock) and not stat.S_ISREG(lock.lstat().st_mode):
            raise StoreError(f"{lock} is no regular file: remove it, or pass another path")
        try:
            # Opened for writing, because network disks lock only writable files.
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o666)
            if fcntl is None:
                raise OSError("this system has no flock")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            assert handle is not None
            holder = clean(os.pread(handle, _QUOTED_BYTES, 0).decode(errors="replace").strip())
            os.close(handle)
            raise StoreInUse(root, holder or f"a process that {LOCK} does not name") from None
        except OSError as error:
            why = f"{lock} cannot be locked ({error.strerror or error})"
            self.warning = f"{why}: a second run in this directory would not be noticed"
        self.release = lambda: None
        if handle is not None:  # closing the file releases the lock
            self.release = weakref.finalize(self, os.close, handle)
        _claims.add(self)


_claims: weakref.WeakSet[Claim] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child may outlive its parent, and must not keep the directory."""
    for each in list(_claims):
        each.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_in_child)
