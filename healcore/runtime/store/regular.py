"""Files that lie in a directory which others may write to: regular ones, or a plain error.

A pipe would be waited for, a device never ends, and what is written through a link lands in
somebody's file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_CLOSED_IN_CHILDREN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def read(path: Path) -> bytes:
    """The content of a file.

    Raises:
        OSError: it cannot be read, or it is a pipe, a device or a directory.
    """
    handle = os.open(path, os.O_RDONLY | _NO_WAITING | _CLOSED_IN_CHILDREN)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
    except BaseException:
        os.close(handle)
        raise
    with os.fdopen(handle, "rb") as file:
        return file.read()


def create(path: str | os.PathLike[str], flags: int = os.O_WRONLY) -> int:
    """A new file, open: never one that is there, never through a link, whatever its name.

    As an `opener` of `open` too.

    Raises:
        FileExistsError: something has the name.
        OSError: it cannot be made.
    """
    del flags  # of open(): "x" says the same
    exclusive = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK
    return os.open(path, exclusive | _CLOSED_IN_CHILDREN, 0o666)
