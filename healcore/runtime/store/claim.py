"""Reserves a directory for one run, and warns if other users can write in it.

Two runs in one directory would delete and quarantine each other's checkpoints. `healcore.lock` in
the root is locked (`flock`) as long as the run lasts. The kernel releases the lock when the process
ends in any way, and the lock works between containers. On a file system without locks only a
second run of the same process is noticed, and the claim has a warning.

Other users who can write in the directory can change the state that this run restores. Digests do
not detect that, because the same users can change the digests.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import stat
import weakref
from dataclasses import dataclass
from pathlib import Path

from healcore.core.printable import clean
from healcore.events import fork_safety
from healcore.runtime.store import files
from healcore.runtime.store.errors import StoreError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "healcore.lock"
_SAFELY = files.NO_LINK | files.NO_WAITING
"""Flags that open the lock file safely if a link or a pipe has just replaced it."""
_LENGTH = 300
"""Bytes of the lock file that an error message quotes."""
_ATTEMPTS = 100
"""Max attempts to lock the file, which other processes may remove in between."""
_UNKNOWN = f"a process that {LOCK} does not name"

_claims: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
"""The claims of this process, by directory."""


@dataclass(eq=False, repr=False)
class StoreInUse(StoreError):
    """Another run uses the directory."""

    root: Path
    holder: str
    """The process of the other run, as its lock file names it."""

    def _message(self) -> str:
        ranks = os.environ.get("WORLD_SIZE", "1")
        hint = (
            f". If that is another rank of this run (WORLD_SIZE={ranks}): call "
            "torch.distributed.init_process_group() before the Healer is entered"
        )
        return (
            f"{self.root} is in use by another run, {self.holder}. Two runs would delete each "
            "other's checkpoints: end the other run first, or pass another directory"
            f"{'' if ranks == '1' else hint}"
        )


class Claim:
    """Reserves a directory until `release`, garbage collection or the end of the process.

    Attributes:
        warning: why another run could use the directory unnoticed, or None.
        locked: whether the file system has locked the file.
    """

    def __init__(
        self, root: Path, handle: int | None, warning: str | None, locked: bool = False
    ) -> None:
        self.root = root
        self.warning = warning
        self.locked = locked
        self._handle = handle
        self._end = weakref.finalize(self, _unlock, root / LOCK, handle, os.getpid())
        _claims[str(root)] = self
        fork_safety.watch(self)

    def release(self) -> None:
        """Releases the directory. Later calls and calls in a forked child do nothing."""
        self._end()
        if _claims.get(str(self.root)) is self:  # and not a later claim
            del _claims[str(self.root)]

    def forked(self) -> None:
        """Gives up the lock in a forked child, which may outlive its parent."""
        _claims.pop(str(self.root), None)
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
    root, handle = Path(root).resolve(), None
    if str(root) in _claims:
        gc.collect()  # releases an abandoned Healer, such as after a failed notebook cell
    if str(root) in _claims:
        who = "this process: leave the `with` block of the earlier Healer, or delete the object"
        raise StoreInUse(root, who)
    try:
        handle, no_locks = _acquire_lock(root)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except OSError as error:
        # The file belongs to another user. An open handle holds the lock nevertheless.
        no_locks = f"{root / LOCK} cannot be written ({error.strerror or error})"
    warning = no_locks and f"{no_locks}: a second run in this directory would not be noticed"
    return Claim(root, handle, warning, locked=no_locks is None)


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
        return str(root.resolve()) not in _claims
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _unlock(lock: Path, handle: int | None, pid: int) -> None:
    if os.getpid() != pid or handle is None:
        return
    with contextlib.suppress(OSError):  # the disk may be gone
        if os.path.samestat(os.fstat(handle), lock.stat()):
            lock.unlink()
    os.close(handle)  # this also releases the lock


def _acquire_lock(root: Path) -> tuple[int, str | None]:
    """Locks the lock file; StoreInUse if another process has locked it.

    Returns its handle, and why the system cannot lock files, or None.
    """
    lock = root / LOCK
    for _ in range(_ATTEMPTS):
        handle = _open_lock_file(lock)
        try:
            no_locks = _flock(handle)
            # The previous holder may have removed the file after it was opened here.
            if os.path.samestat(os.fstat(handle), lock.stat()):
                acquired, handle = handle, -1
                return acquired, None if no_locks is None else f"{lock} {no_locks}"
        except FileNotFoundError:
            continue
        except BlockingIOError:
            raise StoreInUse(root, _holder(handle)) from None
        finally:
            if handle >= 0:
                os.close(handle)
    raise StoreInUse(root, _UNKNOWN)


def _holder(handle: int) -> str:
    """The process that a lock file names."""
    with contextlib.suppress(OSError):
        named = os.pread(handle, _LENGTH, 0).decode(errors="replace").strip()
        return clean(named) or _UNKNOWN
    return _UNKNOWN


def _open_lock_file(lock: Path) -> int:
    """Opens the lock file, creates it if necessary; StoreError if it is no regular file."""
    try:
        mode = lock.lstat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode):
        raise StoreError(
            f"{lock} is no regular file ({stat.filemode(mode)}): remove it, or pass another path"
        )
    try:
        # Opened for writing, because network disks lock only writable files.
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, 0o666)
    except PermissionError:  # the file belongs to another user
        return os.open(lock, os.O_RDONLY | _SAFELY)


def _flock(handle: int) -> str | None:
    """Locks the file. Returns why the system cannot lock files, or None."""
    if fcntl is None:
        return "cannot be locked (this system has no flock)"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return f"cannot be locked ({error.strerror or error})"
    return None


def open_to_others(root: Path) -> str | None:
    """A warning if other users can write in a directory, or None.

    Checks owners and modes of the directory and its direct entries. Access lists and parent
    directories are not checked.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        statuses = [(root, root.stat())]
        with os.scandir(root) as entries:
            statuses += [(Path(entry), entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError:
        return None  # the store reports an unreadable directory
    writable = [(path, why) for path, status in statuses if (why := _why_open(status)) is not None]
    if not writable:
        return None
    path, why = writable[0]
    more = f" (and {len(writable) - 1} more entries)" if len(writable) > 1 else ""
    return (
        f"{path} {why}{more}: other users can change the state that this run resumes from, and no "
        f"digest detects that. To be the only user who can write: chmod go-w {root}, and chown"
    )


def _why_open(status: os.stat_result) -> str | None:
    """Why other users can write in an entry, or None."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if stat.S_ISLNK(status.st_mode) or not status.st_mode & 0o022:
        return None
    who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
    return f"can be written by {who} (mode {stat.S_IMODE(status.st_mode):o})"
