"""`StopFile`: a file that asks a run to end."""

from __future__ import annotations

import os
import time
from pathlib import Path

POLL_INTERVAL_S = 1.0
"""Seconds between two checks for the stop file."""


class StopFile:
    """A file by which a person or a scheduler asks a run to end, with its last state saved.

    The file is not removed, so that it ends all programs of a queue.

    Args:
        path: the file, or None for no file.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path: Path | None = None
        if path is not None:
            self.path = Path(path).absolute()  # the program may change its working directory
        self.why = f"the stop file {self.path}"
        self._found = False
        self._next_look = 0.0
        """Time from which the file system is asked again, by the monotonic clock."""

    @property
    def found(self) -> bool:
        """Whether the file exists, or has existed in this run.

        The file system is asked at most once a second, because the property is read at each step
        and the file may be on a network. False without a path.
        """
        now = time.monotonic()
        if self.path is not None and not self._found and now >= self._next_look:
            self._found = os.path.lexists(self.path)
            self._next_look = now + POLL_INTERVAL_S
        return self._found
