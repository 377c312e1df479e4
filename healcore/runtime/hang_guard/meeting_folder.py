"""The folder in which the guards of all ranks meet, safe from other users of the machine.

The folder is of mode 700 and belongs to the guards' user; any other folder, and a link, is refused.
Its name is random. Each file carries a code (HMAC) of its name and its content under a secret that
rank 0 has drawn for this run and has sent to the others over the channel of the run, so a file of
anybody else does not count. New files are opened with `O_EXCL` and `O_NOFOLLOW`, relative to the
opened folder, and get their names when they are whole.
Standard library only: the guard imports this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from typing import Any

_MAX_BYTES = 1 << 24
"""Of a file: the stacks of a process are far shorter."""
_CODE = 32
"""Bytes of a code."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OLD = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class MeetingFolder:
    """The folder at a path, which need not exist yet.

    Args:
        path: the folder.
        secret: of this run, known to its ranks only.
    """

    def __init__(self, path: str, secret: str) -> None:
        self.path, self._secret = path, secret.encode()

    def make(self) -> None:
        """Makes the folder, unless it exists. Raises OSError."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Writes a file whole. Raises OSError, PermissionError if the folder is not private."""
        data = json.dumps(content).encode()
        new = f".{os.urandom(8).hex()}"
        with self._opened() as folder:
            with open(os.open(new, _NEW, 0o600, dir_fd=folder), "wb") as file:
                file.write(self._code(name, data) + data)
            os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)

    def get(self, name: str) -> dict[str, Any] | None:
        """The content of a file that a guard of this run has written, or None."""
        try:
            with self._opened() as folder, open(os.open(name, _OLD, dir_fd=folder), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                found = file.read(_MAX_BYTES)
        except OSError:
            return None
        import hmac  # here and below: OpenSSL takes 4 MB, which a guard needs at an alarm only

        code, data = found[:_CODE], found[_CODE:]
        return json.loads(data) if hmac.compare_digest(code, self._code(name, data)) else None

    def names(self) -> list[str]:
        """The files in it. Empty if there is no private folder."""
        try:
            with self._opened() as folder:
                return os.listdir(folder)
        except OSError:
            return []

    def take(self, name: str) -> bool:
        """Whether this guard is the first to take this name."""
        try:
            with self._opened() as folder:
                os.close(os.open(name, _NEW, 0o600, dir_fd=folder))
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Removes the folder with its files."""
        with contextlib.suppress(OSError), self._opened():
            shutil.rmtree(self.path, ignore_errors=True)

    def _code(self, name: str, data: bytes) -> bytes:
        import hmac

        return hmac.digest(self._secret, name.encode() + b"\0" + data, "sha256")

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Descriptor of the folder; OSError if it is no folder of this user alone."""
        handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(handle)
            if stat.S_IMODE(found.st_mode) & 0o077 or found.st_uid != _user_in(handle, found):
                raise PermissionError(f"{self.path} is not a folder of this user alone")
            yield handle
        finally:
            os.close(handle)


def _user_in(folder: int, found: os.stat_result) -> int:
    """This user's number in a folder: NFS may give files of root to another (`root_squash`)."""
    if found.st_uid == os.geteuid():
        return found.st_uid
    name = f".{os.urandom(8).hex()}"
    handle = os.open(name, _NEW, 0o600, dir_fd=folder)
    try:
        return os.fstat(handle).st_uid
    finally:
        os.close(handle)
        os.unlink(name, dir_fd=folder)
