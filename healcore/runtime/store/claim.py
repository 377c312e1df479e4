"""One run at a time in a directory: two would prune and quarantine each other's checkpoints.

`healcore.lock` in the root names the process that runs there, and is locked (`flock`) as long as
the run lasts. The kernel gives the lock back when the process ends, however it ends, and it sees
the processes of other containers. The name alone would not do: containers may share a host name and
have process numbers of their own. On a file system without locks it has to, and a warning says so.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import stat
import time
import weakref
from pathlib import Path
from typing import Any

from healcore.runtime import forking
from healcore.runtime.events.process import Process, here
from healcore.runtime.store import regular
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.sealed import Unsealed, seal, unseal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "healcore.lock"
_SAFELY = regular.NO_LINK | getattr(os, "O_NONBLOCK", 0)
"""Even if a link or a pipe took its place just now."""
_ATTEMPTS = 100
_PAUSE_S = 0.01
"""Between two of them. Who holds the lock may only be looking, or about to write its name."""

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""Those of this process, by token."""


class StoreInUse(StoreError):
    """Another run is at work in the directory.

    Attributes:
        root: the directory.
        process: of the other run; None if its name cannot be read.
    """

    def __init__(self, root: Path, process: Process | None) -> None:
        super().__init__(root, process)
        self.root = root
        self.process = process

    def __str__(self) -> str:
        """Who, and the ways out."""
        if self.process is None:
            who = f"a process that {LOCK} does not name"
        elif self.process == here():
            who = "this process: leave the `with` block of the earlier Healer, or delete the object"
        else:
            who = f"process {self.process.pid} on {self.process.host}"
        return (
            f"{self.root} is in use by another run, {who}. Two would delete each other's "
            "checkpoints: end that one first, or pass another directory"
        )


class Claim:
    """The right to work in a directory: until it is released or forgotten, or the process ends.

    Attributes:
        root: the directory.
        warning: what could not be made sure of; None if the directory is this run's for certain.
    """

    def __init__(self, root: Path, token: str, handle: int | None, warning: str | None) -> None:
        self.root = root
        self.warning = warning
        self._handle = handle
        self._end = weakref.finalize(self, _give_back, root / LOCK, token, handle, os.getpid())
        _claims[token] = self
        forking.watch(self)

    def release(self) -> None:
        """Gives it back. Twice is once, and in a forked child nothing: it is the parent's."""
        self._end()

    def forked(self) -> None:
        """In a child: one that outlives its parent must not keep the directory locked."""
        if self._end.detach() is not None and self._handle is not None:
            os.close(self._handle)


def claim(root: str | os.PathLike[str]) -> Claim:
    """Takes a directory for the run of this process. With several ranks, from rank 0 alone.

    Args:
        root: the store's directory; it is there.

    Returns:
        The claim. Its `warning` says if a run that cannot be seen from here may be at work there:
        the file system has no locks, or takes no lock file.

    Raises:
        StoreInUse: another run is at work there.
        StoreError: `healcore.lock` is there, and no file.
    """
    root, token = Path(root).absolute(), secrets.token_hex(8)
    handle = None
    try:
        handle, no_locks = _locked(root)
        warning = _unless_free(root, no_locks)
        os.ftruncate(handle, 0)
        os.pwrite(handle, seal({"schema": 1, "token": token, **here()._asdict()}), 0)
    except OSError as error:
        # An open handle is locked all the same: the file is another user's and keeps that name.
        why = f"{root / LOCK} cannot be written ({error.strerror or error})"
        return Claim(
            root, token, handle, f"{why}: a second run in this directory would not be noticed"
        )
    except BaseException:
        if handle is not None:
            os.close(handle)
        raise
    return Claim(root, token, handle, warning)


def held_by_another(root: Path) -> bool:
    """Whether another process has the directory for certain: its work there is not abandoned."""
    lock = root / LOCK
    try:
        if fcntl is None or not stat.S_ISREG(lock.lstat().st_mode):
            return False
        handle = os.open(lock, os.O_RDONLY | _SAFELY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(lock).get("token") not in _claims
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _give_back(lock: Path, token: str, handle: int | None, pid: int) -> None:
    if os.getpid() != pid:
        return
    _claims.pop(token, None)
    with contextlib.suppress(OSError):  # a disk that has gone: nobody else starts there either
        if _read(lock).get("token") == token:
            lock.unlink()
    if handle is not None:
        os.close(handle)  # and the lock with it


def _locked(root: Path) -> tuple[int, str | None]:
    """The lock file, open and locked; and why it is not locked, where there are no locks.

    Raises:
        StoreInUse: another process has it.
        StoreError: it is no file.
        OSError: it cannot be opened.
    """
    lock, holder = root / LOCK, None
    for attempt in range(_ATTEMPTS):
        handle = _opened(lock)
        try:
            no_locks = _flock(handle)
            # While it was opened, the one before may have taken the file away.
            if os.path.samestat(os.fstat(handle), lock.stat()):
                handle, mine = -1, handle
                return mine, no_locks
        except FileNotFoundError:
            continue
        except BlockingIOError:
            holder = _holder(_read(lock))
            if attempt == 0 and holder == here():
                gc.collect()  # an abandoned Healer, a notebook's cell that failed
            elif holder is not None and holder.gone() is False:
                break
            time.sleep(_PAUSE_S)
        finally:
            if handle >= 0:
                os.close(handle)
    raise StoreInUse(root, holder)


def _opened(lock: Path) -> int:
    """The lock file, made if it is not there.

    Raises:
        StoreError: it is a link, a pipe or a directory: not of our making, and a pipe would hang.
    """
    try:
        mode = lock.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise StoreError(
            f"{lock} is no regular file ({stat.filemode(mode)}), and healcore locks no other: "
            "remove it, or pass another directory"
        )
    try:
        # To write, even to look: a network disk locks no other file.
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except PermissionError:
        return os.open(lock, os.O_RDONLY | _SAFELY)  # another user's


def _flock(handle: int) -> str | None:
    """Locks it; or why that cannot be done here.

    Raises:
        BlockingIOError: another process has locked it.
    """
    if fcntl is None:
        return "this system has no flock"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return error.strerror or str(error)
    return None


def _read(lock: Path) -> dict[str, Any]:
    """Its content; empty if nobody can have written it whole."""
    try:
        return unseal(regular.read(lock))
    except (OSError, Unsealed):
        return {}


def _holder(found: dict[str, Any]) -> Process | None:
    try:
        return Process(*(found[field] for field in Process._fields))
    except KeyError:
        return None


def _unless_free(root: Path, no_locks: str | None) -> str | None:
    """A warning if it may not be free, by the name in the file.

    Raises:
        StoreInUse: it is not: there are no locks, or the process is of an older healcore.
    """
    lock, found = root / LOCK, _read(root / LOCK)
    holder = _holder(found)
    if holder is not None:
        gone = found.get("token") not in _claims if holder == here() else holder.gone()
        if gone is False:
            raise StoreInUse(root, holder)
        # In a container of this machine: the kernel has said that its lock is free.
        seen = no_locks is None and holder.boot == here().boot
        if gone is None and not seen:
            return (
                f"{lock} names process {holder.pid} on {holder.host}, which cannot be seen from "
                "here: if that run is still alive, and the disk does not lock files across "
                "machines, the two delete each other's checkpoints"
            )
    if no_locks is not None:
        return (
            f"{lock} cannot be locked ({no_locks}): a second run in this directory, in another "
            "container or on another machine, would not be noticed"
        )
    return None
