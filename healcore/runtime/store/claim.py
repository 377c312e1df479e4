"""One run at a time in a directory: two would prune and quarantine each other's checkpoints.

`healcore.lock` in the root names the process that runs there. It comes into being by one atomic
link, so of several that start at once one wins; that of a process which has ended is taken over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from healcore.runtime.events.process import Process, here
from healcore.runtime.store import atomic, names, sweeping
from healcore.runtime.store.errors import StoreError
from healcore.runtime.store.sealed import Unsealed, seal, unseal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "healcore.lock"
_ATTEMPTS = 100

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""Those of this process, by token. One that nobody has any more is free to be taken."""


class StoreInUse(StoreError):
    """Another run is at work in the directory.

    Attributes:
        root: the directory.
        process: of the other run.
    """

    def __init__(self, root: Path, process: Process) -> None:
        super().__init__(root, process)
        self.root = root
        self.process = process

    def __str__(self) -> str:
        """Who, and the ways out."""
        who = "this process" if self.process.pid == os.getpid() else f"process {self.process.pid}"
        return (
            f"{self.root} is in use by another run, {who} on {self.process.host}, and two would "
            "delete each other's checkpoints: end that one first, or pass another directory"
        )


class Claim:
    """The right to work in a directory, until it is released or the process has ended.

    Attributes:
        root: the directory.
        warning: what could not be made sure of; None if the directory is this run's for certain.
    """

    def __init__(self, root: Path, token: str, warning: str | None) -> None:
        self.root = root
        self.warning = warning
        self._token = token
        self._pid = os.getpid()
        _claims[token] = self

    def release(self) -> None:
        """Gives it back. Twice is once, and in a forked child nothing: it is the parent's."""
        if _claims.pop(self._token, None) is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # a disk that has gone: nobody else starts there either
            found = _read(self.root / LOCK)
            if found is not None and found.get("token") == self._token:
                (self.root / LOCK).unlink()


def claim(root: str | os.PathLike[str]) -> Claim:
    """Takes a directory for the run of this process. With several ranks, from rank 0 alone.

    Args:
        root: the store's directory; it is there.

    Returns:
        The claim. Its `warning` says if another machine's process may be at work there, which
        cannot be seen from here, or if the disk takes no lock file.

    Raises:
        StoreInUse: a living process of this machine is at work there.
    """
    root, token = Path(root).absolute(), secrets.token_hex(8)
    temporary = root / names.new_temporary()
    warning = None
    try:
        atomic.write_new(temporary, seal({"schema": 1, "token": token, **here()._asdict()}))
        for _ in range(_ATTEMPTS):
            if _created(temporary, root / LOCK):
                return Claim(root, token, warning)
            with _alone(root / LOCK) as found:
                if found is None:
                    continue  # it has just gone, or was taken over
                warning = _unless_free(root, found)
                temporary.replace(root / LOCK)
                return Claim(root, token, warning)
        raise OSError(f"{LOCK} keeps changing")
    except OSError as error:
        why = f"{root / LOCK} cannot be written ({error.strerror or error})"
        return Claim(root, token, f"{why}: a second run in this directory would not be noticed")
    finally:
        sweeping.discard(temporary)
        names.done_with(temporary.name)


def _created(temporary: Path, lock: Path) -> bool:
    """Whether the lock was not there, and is now: with all of its content, in one step."""
    try:
        os.link(temporary, lock)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            atomic.write_new(lock, temporary.read_bytes())
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[dict[str, Any] | None]:
    """The lock's content while no other process can take it over; None if it is not there.

    Content that nobody can have written whole is empty. Where the system knows no `flock`, two may
    take over the leavings of a third in the same microseconds.
    """
    try:
        # To write, although nothing is: a network disk locks no other file. Another user's may
        # only be readable.
        handle = os.open(lock, os.O_RDWR if os.access(lock, os.W_OK) else os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        if fcntl is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        # While this one waited, another may have put its own in the place.
        try:
            same = os.path.samestat(os.fstat(handle), lock.stat())
        except FileNotFoundError:
            same = False
        yield _read(lock) if same else None
    finally:
        os.close(handle)


def _read(lock: Path) -> dict[str, Any] | None:
    try:
        return unseal(lock.read_bytes())
    except FileNotFoundError:
        return None
    except Unsealed:
        return {}


def _unless_free(root: Path, found: dict[str, Any]) -> str | None:
    """A warning if it may not be free.

    Raises:
        StoreInUse: it is not.
    """
    try:
        holder = Process(*(found[field] for field in Process._fields))
    except KeyError:
        return None  # torn by a power cut, or nothing of healcore's: no process stands behind it
    if holder == here():
        gone = found.get("token") not in _claims
    else:
        gone = holder.gone()
    if gone is None:
        return (
            f"{root / LOCK} names process {holder.pid} on {holder.host}, which cannot be seen from "
            "here: if that run is still alive, the two delete each other's checkpoints"
        )
    if not gone:
        raise StoreInUse(root, holder)
    return None
