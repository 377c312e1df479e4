"""The lines that are added to a file, whatever happens to the file meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_BLOCK = 1 << 20
_LONGEST = 1 << 24
"""Bytes of a line after which it is given up: no event has as many."""


class News(NamedTuple):
    """What has happened since the last look."""

    lines: list[bytes]
    """Whole lines, without their ends."""
    anew: bool
    """The file is another one, or was emptied: the lines are from its beginning."""
    more: bool
    """There is more to read already."""


class Tail:
    """Reads a file that grows. It need not be there yet, and may be rotated or emptied.

    A line without its end is held back until the rest has come.

    Args:
        path: the file.
        last: only its end, from so many bytes before, matters; None: all of it.
    """

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        self.path = path
        self.there = False
        """Whether it was, at the last look."""
        self.trouble = ""
        """Why it could not be read at the last look, if it is there."""
        self._last = last
        self._identity: tuple[int, int] | None = None
        self._place = 0
        self._rest = b""

    def look(self) -> News:
        """What is new. A file that cannot be read raises nothing: `there` and `trouble` say so."""
        self.trouble = ""
        try:
            with self.path.open("rb") as file:
                self.there = True
                return self._read(file, os.fstat(file.fileno()))
        except FileNotFoundError:
            self.there = False
        except OSError as error:
            self.trouble = f"{self.path}: {error.strerror or error}"
        return News([], False, False)

    def _read(self, file, stat: os.stat_result) -> News:
        identity = (stat.st_dev, stat.st_ino)
        known = self._identity is not None
        anew = identity != self._identity or stat.st_size < self._place
        if anew:
            self._identity, self._rest, self._place = identity, b"", 0
            if self._last is not None and stat.st_size > self._last:
                self._place = stat.st_size - self._last
                file.seek(self._place)
                self._place += len(file.readline())  # of the line in the middle of which it is
        file.seek(self._place)
        block = file.read(_BLOCK)
        self._place += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest[:80]], b""
        return News(lines, anew and known, len(block) == _BLOCK)
