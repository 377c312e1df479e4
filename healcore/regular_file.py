"""Opens files for reading, only regular ones: a pipe would block its reader, a device may not end.

Every reader of healcore opens its files here.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def opener(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a regular file without waiting: `open(path, "rb", opener=opener)`.

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
            why = "is a pipe or a device, and only regular files are read: save it to a file"
            raise OSError(errno.EINVAL, why, str(path))
    except BaseException:
        os.close(handle)
        raise
    return handle


def read(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file.

    Args:
        path: the file.
        most: bytes; a larger file, such as a sparse one, is refused before it is read.

    Raises:
        OSError: the path is no regular file, is larger, or cannot be read.
    """
    with open(path, "rb", opener=opener) as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            why = f"has {size} bytes, and is never larger than {most}"
            raise OSError(errno.EFBIG, why, str(path))
        return file.read() if most is None else file.read(size)
