"""`StopFile`: a file by which a person or a scheduler asks a run to end, with its last state saved.

The file is looked at in a thread, once a second: on a network disk a look may take its time, or
never return. It is left where it is, so that the programs of a queue all end while it is there.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks."""


class StopFile:
    """Looks for a file from `start` to `close`; without a path it does nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        # Absolute: the program may change its working directory.
        self.path = None if path is None else Path(path).absolute()
        self.found = False
        """The file has appeared."""
        self._closed = threading.Event()

    @property
    def why(self) -> str:
        """What asks the run to end, for a sentence."""
        return f"the stop file {self.path}"

    def there(self) -> bool:
        """Whether the file is there now."""
        return self.path is not None and os.path.lexists(self.path)

    def start(self) -> None:
        """Begins to look."""
        if self.path is not None:
            threading.Thread(target=self._look, name="healcore-stop-file", daemon=True).start()

    def close(self) -> None:
        """Looks no more, without waiting for a look under way."""
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(LOOK_S):
            if self.there():
                self.found = True
                return
