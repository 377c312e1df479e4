"""Opens regular files for reading; a pipe would block the reader, and a device may have no end.

All readers of healcore open files here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file without blocking: `open(path, "rb", opener=opener)`.

    Raises:
        OSError: the path is a pipe, a device or a socket, or cannot be opened.
        IsADirectoryError: the path is a directory.
    """
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            reason = "a pipe or a device, not a regular file: save its content to a file first"
            raise OSError(errno.EINVAL, reason, str(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def read(path: Path, max_bytes: int | None = None) -> bytes:
    """Reads a whole regular file.

    Args:
        path: the file.
        max_bytes: limit on the file's size, or None for no limit. The size is checked before any
            byte is read, because a sparse file may be huge.

    Raises:
        OSError: the path is not a regular file, is larger than the limit, or cannot be read.
    """
    with open(path, "rb", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        if max_bytes is not None and size > max_bytes:
            reason = f"the file has {size} bytes, and the limit is {max_bytes}"
            raise OSError(errno.EFBIG, reason, str(path))
        if max_bytes is None:
            return file.read()
        return file.read(size)  # the file may have grown since the check
