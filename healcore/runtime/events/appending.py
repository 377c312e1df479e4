"""Appending whole lines to a file that others may write too, may rotate away, or may have torn."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


class Appender:
    """One file, opened at the first line and made anew when it is no longer at its path.

    Args:
        path: the file. Its directory is made.
        named: the path is the user's. One of healcore's own choice is not written through a link:
            whoever put that there would choose what is written to.
    """

    def __init__(self, path: Path, *, named: bool = True) -> None:
        self.path = path
        self._named = named
        self._handle: int | None = None

    def append(self, lines: bytes, *, durable: bool = False) -> None:
        """Adds whole lines, in one call, so that with O_APPEND nobody's line comes in between.

        Args:
            lines: ending with a line feed.
            durable: wait for the disk.

        Raises:
            OSError: not all of it could be written; the next call opens the file again.
        """
        try:
            handle, torn = self._opened()
            # The line feed in front ends a torn line, whoever tore it. Truncating it away instead
            # could take with it what another writer has added by then. The rest of a short write
            # would be a second call, to a disk that is full.
            data = b"\n" + lines if torn else lines
            written = os.write(handle, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            if durable:
                with contextlib.suppress(OSError):  # a pipe or a terminal has nothing to wait for
                    os.fsync(handle)
        except BaseException:
            self.close()  # a stale handle (a network disk that came back) stays so
            raise

    def close(self) -> None:
        """Closes the file. A later `append` opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _opened(self) -> tuple[int, bool]:
        """The file that is at the path now, and whether its last line has no end."""
        if self._handle is not None:
            there, ours = _stat(self.path, self._named), os.fstat(self._handle)
            if there is None or not os.path.samestat(there, ours):
                self.close()
        if self._handle is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = _open(self.path, self._named)
        if not os.fstat(self._handle).st_size:  # a pipe has no size either
            return self._handle, False
        os.lseek(self._handle, -1, os.SEEK_END)  # what is written is appended all the same
        return self._handle, os.read(self._handle, 1) != b"\n"


def _open(path: Path, named: bool) -> int:
    there = _stat(path, named)
    plain = there is None or stat.S_ISREG(there.st_mode)
    # Never waiting, for a pipe that nobody reads; not for reading either, which would be a reader.
    special = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
    flags = os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    flags |= 0 if named else getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | (os.O_RDWR if plain else special), 0o666)


def _stat(path: Path, named: bool) -> os.stat_result | None:
    try:
        return path.stat(follow_symlinks=named)
    except OSError:
        return None
