"""Whether a directory belongs to this run alone: no second run, and no other user who can write.

Two runs in one directory would prune and quarantine each other's checkpoints. `healcore.lock` in
the root names the process that runs there, and is locked (`flock`) as long as the run lasts. The
kernel releases the lock however the process ends, and sees the processes of other containers. The
name alone is not enough, because containers may share a host name and have process numbers of their
own. Without locks in the file system it has to be, and a warning reports that.

Whoever else can write there can change what this run restores. Digests are next to the files and do
not detect that; owners and modes do.
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
"""Flags to open it with, in case a link or a pipe has just taken its place."""
_ATTEMPTS = 100
_PAUSE_S = 0.01
"""Between two attempts. The holder may only be looking, or about to write its name."""

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""The claims of this process, by token."""


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
    """The right to work in a directory, until it is released or forgotten, or the process ends.

    `warning` is why another run may be there too; None if the directory is certainly this run's.
    `locked` is whether the file system has locked it.
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
        """Releases it. A second call does nothing, nor does a call in a forked child."""
        self._end()

    def forked(self) -> None:
        """In a child: one that outlives its parent must not keep the directory locked."""
        if self._end.detach() is not None and self._handle is not None:
            os.close(self._handle)


def claim(root: str | os.PathLike[str]) -> Claim:
    """Takes a store's directory for the run of this process. With several ranks, on rank 0 only.

    The claim has a `warning` if a run that cannot be seen from here may be at work there: the file
    system has no locks, or takes no lock file.

    Raises:
        StoreInUse: another run is at work there.
        StoreError: `healcore.lock` is there, and is no file.
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
        # An open handle is locked nevertheless: the file is another user's and keeps that name.
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
    """Whether another process certainly has the directory: its work there is not abandoned."""
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
    with contextlib.suppress(OSError):  # a disk that has gone: nobody else starts there either
        if _read(lock).get("token") == token:
            lock.unlink()
    if handle is not None:
        os.close(handle)  # and the lock with it


def _locked(root: Path) -> tuple[int, str | None]:
    """The lock file, open; why it could not be locked, or None. StoreInUse if another has it."""
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
                gc.collect()  # an abandoned Healer, a notebook's cell that failed
            elif holder is not None and holder.gone() is False:
                break
            time.sleep(_PAUSE_S)
        finally:
            if handle >= 0:
                os.close(handle)
    raise StoreInUse(root, holder)


def _opened(lock: Path) -> int:
    """The lock file, created if necessary; StoreError if it is no file: a pipe would hang."""
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
        # For writing, even to look: a network disk locks no other file.
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except PermissionError:
        return os.open(lock, os.O_RDONLY | _SAFELY)  # another user's


def _flock(handle: int) -> str | None:
    """Locks it and returns None, or why that cannot be done; BlockingIOError if another has it."""
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
    """The content, or an empty dictionary if the file is missing or torn."""
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
    return holder if holder.pid > 0 else None  # other numbers stand for groups of processes


def _unless_free(root: Path, no_locks: str | None) -> str | None:
    """A warning if the process that the file names may still be there; StoreInUse if it is there.

    The lock does not exclude that on a disk without locks, or with an older healcore.
    """
    lock, found = root / LOCK, _read(root / LOCK)
    holder = _holder(found)
    if holder is not None:
        gone = (
            str(found.get("token")) not in _claims if holder == current_process() else holder.gone()
        )
        if gone is False:
            raise StoreInUse(root, holder)
        # Same boot: a live process, even in another container, would still have the lock.
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
    """A warning if another user can write in a directory; None if only this user and root can.

    Checks owners and modes of the directory and of its entries, not deeper. Access lists, and who
    can write to the directories above, are not checked.
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
        f"{path} {why}{more}: whoever can write there can change what this run goes on from, and "
        f"no digest detects that. If it is to be yours alone: chmod go-w {root}, and chown"
    )


def _why_open(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o022:
        return None
    who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    return f"can be written by {who} (mode {stat.S_IMODE(status.st_mode):o})"
