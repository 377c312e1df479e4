"""Reads the events of a run while the run writes them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from healcore import regular_file
from healcore.events.json_lines import MAX_LINE_BYTES

POLL_INTERVAL = 0.5
"""Seconds between two reads."""

_BLOCK_BYTES = 1 << 20


class Tail:
    """The lines of a growing file, which may not exist yet, and may be rotated or emptied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._incomplete = b""  # the last line, before its newline is written

    def new_lines(self) -> Iterator[bytes]:
        """The whole lines since the last call, without newlines.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            with open(self.path, "rb", opener=regular_file.opener) as file:
                yield from self._read(file)
        except FileNotFoundError:
            return

    def _read(self, file: BinaryIO) -> Iterator[bytes]:
        stat = os.fstat(file.fileno())
        identity = (stat.st_dev, stat.st_ino)
        if identity != self._identity or stat.st_size < self._position:
            self._identity, self._incomplete, self._position = identity, b"", 0
        file.seek(self._position)
        while block := file.read(_BLOCK_BYTES):
            self._position += len(block)
            *lines, self._incomplete = (self._incomplete + block).split(b"\n")
            if len(self._incomplete) > MAX_LINE_BYTES:
                lines, self._incomplete = [*lines, self._incomplete[:80]], b""
            yield from lines


def batches_of_lines(path: Path) -> Iterator[list[bytes]]:
    """Yields the new lines of a file at each poll, without end; an empty list if there are none."""
    tail = Tail(path)
    while True:
        yield list(tail.new_lines())
        time.sleep(POLL_INTERVAL)
