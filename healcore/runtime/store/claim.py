"""Reserves a directory for one run, and warns if other users can write in it.

Two runs in one directory would delete and quarantine each other's checkpoints. `healcore.lock` in
the root names the process that runs there, and is locked (`flock`) as long as the run lasts. The
kernel releases the lock when the process ends in any way, and the lock works between containers.
The name is not enough, because containers may share a host name and have the same process numbers.
In a file system without locks only the name counts, and a warning reports that.

Other users who can write there can change what this run restores. Digests do not detect that,
because they are next to the files.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import stat
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from healcore.core.printable import clean
from healcore.events import fork_safety
from healcore.events.process import Process, current_process
from healcore.runtime.store import checksummed_json, files
from healcore.runtime.store.checksummed_json import ChecksumError
from healcore.runtime.store.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "healcore.lock"
_SAFELY = files.NO_LINK | files.NO_WAITING
"""Flags to open the lock file with, in case a link or a pipe has just replaced it."""
_ATTEMPTS = 100
_PAUSE_S = 0.01
"""Seconds between two attempts. The holder may be about to write its name."""

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""The claims of this process, by token."""


@dataclass(eq=False, repr=False)
class StoreInUse(StoreError):
    """Another run uses the directory."""

    root: Path
    process: Process | None
    """The process of the other run, or None if its name cannot be read."""

    def _message(self) -> str:
        if self.process is None:
            who = f"a process that {LOCK} does not name"
        elif self.process == current_process():
            who = "this process: leave the `with` block of the earlier Healer, or delete the object"
        else:
            who = f"process {self.process.pid} on {self.process.host}"
        ranks = os.environ.get("WORLD_SIZE", "1")
        hint = (
            f". If that is another rank of this run (WORLD_SIZE={ranks}): call "
            "torch.distributed.init_process_group() before the Healer is entered"
        )
        return (
            f"{self.root} is in use by another run, {who}. Two would delete each other's "
            "checkpoints: end that one first, or pass another directory"
            f"{'' if ranks == '1' else hint}"
        )


class Claim:
    """Reserves a directory until `release`, garbage collection or the end of the process.

    Attributes:
        warning: why another run may use the directory too, or None.
        locked: whether the file system has locked the file.
    """

    def __init__(
        self, root: Path, token: str, handle: int | None, warning: str | None, locked: bool = False
    ) -> None:
        self.root = root
        self.warning = warning
        self.locked = locked
        self._handle = handle
        self._end = weakref.finalize(self, _unlock, root / LOCK, token, handle, os.getpid())
        _claims[token] = self
        fork_safety.watch(self)

    def release(self) -> None:
        """Releases the directory. Later calls and calls in a forked child do nothing."""
        self._end()

    def forked(self) -> None:
        """In a child, which must not keep the directory locked after its parent has ended."""
        if self._end.detach() is not None and self._handle is not None:
            os.close(self._handle)


def claim(root: str | os.PathLike[str]) -> Claim:
    """Reserves a store's directory for this process. With several ranks, on rank 0 only.

    The claim has a `warning` if another run may use the directory without being noticed: the file
    system has no locks, or `healcore.lock` cannot be written.

    Raises:
        StoreInUse: another run uses the directory.
        StoreError: `healcore.lock` exists but is not a regular file.
    """
    root, token = Path(root).absolute(), secrets.token_hex(8)
    handle = None
    try:
        handle, no_locks = _locked(root)
        warning = _unless_free(root, no_locks)
        os.ftruncate(handle, 0)
        content = {"schema": 1, "token": token, **current_process()._asdict()}
        os.pwrite(handle, checksummed_json.dumps(content), 0)
    except OSError as error:
        # An open handle is locked all the same: the file belongs to another user.
        why = f"{root / LOCK} cannot be written ({error.strerror or error})"
        return Claim(
            root, token, handle, f"{why}: a second run in this directory would not be noticed"
        )
    except BaseException:
        if handle is not None:
            os.close(handle)
        raise
    return Claim(root, token, handle, warning, locked=no_locks is None)


def held_by_another(root: Path) -> bool:
    """Whether another process has locked the directory."""
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
        return str(_read(lock).get("token")) not in _claims
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _unlock(lock: Path, token: str, handle: int | None, pid: int) -> None:
    if os.getpid() != pid:
        return
    _claims.pop(token, None)
    with contextlib.suppress(OSError):  # the disk has gone
        if _read(lock).get("token") == token:
            lock.unlink()
    if handle is not None:
        os.close(handle)  # and the lock with it


def _locked(root: Path) -> tuple[int, str | None]:
    """Handle of the lock file, and why it could not be locked, or None.

    Raises StoreInUse if another process has locked it.
    """
    lock, holder = root / LOCK, None
    for attempt in range(_ATTEMPTS):
        handle = _opened(lock)
        try:
            no_locks = _flock(handle)
            # While it was opened, the previous holder may have removed the file.
            if os.path.samestat(os.fstat(handle), lock.stat()):
                handle, mine = -1, handle
                return mine, no_locks
        except FileNotFoundError:
            continue
        except BlockingIOError:
            holder = _holder(_read(lock))
            if attempt == 0 and holder == current_process():
                gc.collect()  # an abandoned Healer, such as one in a notebook cell that failed
            elif holder is not None and holder.gone() is False:
                break
            time.sleep(_PAUSE_S)
        finally:
            if handle >= 0:
                os.close(handle)
    raise StoreInUse(root, holder)


def _opened(lock: Path) -> int:
    """Handle of the lock file, created if necessary; StoreError if it is no regular file."""
    try:
        mode = lock.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise StoreError(
            f"{lock} is no regular file ({stat.filemode(mode)}), and the lock has to be one: "
            "remove it, or pass another directory"
        )
    try:
        # For writing: network disks lock only writable files.
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except PermissionError:  # the file belongs to another user
        return os.open(lock, os.O_RDONLY | _SAFELY)


def _flock(handle: int) -> str | None:
    """Locks the file; returns None, or why the system cannot lock it."""
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
    """The content, or an empty dictionary if the file is missing or damaged."""
    try:
        return checksummed_json.read(lock)
    except (OSError, ChecksumError):
        return {}


def _holder(found: dict[str, Any]) -> Process | None:
    fields = {field: found.get(field) for field in Process._fields}
    try:
        holder = TypeAdapter(Process).validate_python(fields, strict=True)
    except ValidationError:
        return None
    return holder if holder.pid > 0 else None  # other numbers name groups of processes


def _unless_free(root: Path, no_locks: str | None) -> str | None:
    """A warning if the process that the file names may be alive; StoreInUse if it is alive.

    The lock does not exclude this on a disk without locks.
    """
    lock, found = root / LOCK, _read(root / LOCK)
    holder = _holder(found)
    if holder is not None:
        gone = (
            str(found.get("token")) not in _claims if holder == current_process() else holder.gone()
        )
        if gone is False:
            raise StoreInUse(root, holder)
        # Same boot: a living process, even in another container, would hold the lock.
        seen = no_locks is None and holder.boot == current_process().boot
        if gone is None and not seen:
            return (
                f"{lock} names process {holder.pid} on {clean(holder.host)}, which cannot be seen "
                "from here: if that run is still alive, and the disk does not lock files across "
                "machines, the two delete each other's checkpoints"
            )
    if no_locks is not None:
        return (
            f"{lock} cannot be locked ({no_locks}): a second run in this directory, in another "
            "container or on another machine, would not be noticed"
        )
    return None


def open_to_others(root: Path) -> str | None:
    """A warning if other users can write in a directory, or None.

    Checks owners and modes of the directory and of its entries, not deeper. Access lists and the
    directories above are not checked.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        found = [(root, root.stat())]
        with os.scandir(root) as entries:
            found += [(Path(entry), entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None  # reported where it is needed
    open_ = [(path, why) for path, status in found if (why := _why_open(status)) is not None]
    if not open_:
        return None
    path, why = open_[0]
    more = f", and so for {len(open_) - 1} more in it" if len(open_) > 1 else ""
    return (
        f"{path} {why}{more}: a user who can write there can change what this run resumes "
        f"from, and no digest detects that. To make it yours alone: chmod go-w {root}, and chown"
    )


def _why_open(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o022:
        return None
    who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    return f"can be written by {who} (mode {stat.S_IMODE(status.st_mode):o})"
