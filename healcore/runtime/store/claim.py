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
from healcore.runtime.store.forks import watch_forks

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
        message = (
            f"{self.root} is in use by another run, {self.holder}. Two runs would delete each "
            "other's checkpoints: end the other run first, or pass another directory"
        )
        ranks = os.environ.get("WORLD_SIZE", "1")
        if ranks != "1":
            message += f". If that is another rank of this run (WORLD_SIZE={ranks}): call "
            message += "torch.distributed.init_process_group() before the Healer is entered"
        return message


StoreInUse.__module__ = "healcore.errors"


class Claim:
    """Reserves a directory until `release`, garbage collection or the end of the process.

    Args:
        handle: the open lock file, or None if it could not be opened.

    Attributes:
        warning: why another run could use the directory unnoticed, or None.
    """

    def __init__(self, handle: int | None, warning: str | None = None) -> None:
        self.warning = warning
        self._end = None
        if handle is not None:  # closing the file also releases the lock
            self._end = weakref.finalize(self, os.close, handle)
        watch_forks(self)

    def release(self) -> None:
        """Releases the directory. Later calls and calls in a forked child do nothing."""
        if self._end is not None:
            self._end()

    forked = release  # a forked child may outlive its parent


def claim(root: str | os.PathLike[str]) -> Claim:
    """Reserves a store's directory for this process. With several ranks, on rank 0 only.

    The claim has a `warning` if another run may use the directory without being noticed: the file
    system has no locks, or `healcore.lock` cannot be written.

    Args:
        root: the directory, which exists.

    Raises:
        StoreInUse: another run uses the directory.
        StoreError: `healcore.lock` exists but is not a regular file.
    """
    root = Path(root).resolve()
    handle = None
    lock = root / LOCK
    if os.path.lexists(lock):
        mode = lock.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise StoreError(
                f"{lock} is no regular file ({stat.filemode(mode)}): remove it, or pass another "
                "path"
            )
    name = f"process {os.getpid()} on {socket.gethostname()}"
    try:
        # Opened for writing, because network disks lock only writable files.
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o666)
        if fcntl is None:
            raise OSError("this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{name}\n".encode(), 0)
    except BlockingIOError:
        assert handle is not None
        holder = clean(os.pread(handle, _QUOTED_BYTES, 0).decode(errors="replace").strip())
        os.close(handle)
        if holder == name:
            advice = "leave the `with` block of the earlier Healer, or delete the object"
            holder = f"this process: {advice}"
        raise StoreInUse(root, holder or f"a process that {LOCK} does not name") from None
    except OSError as error:
        why = f"{lock} cannot be locked ({error.strerror or error})"
        return Claim(handle, f"{why}: a second run in this directory would not be noticed")
    return Claim(handle)
