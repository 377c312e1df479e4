"""What a person at the terminal is told: one line per turn of the story, not per alarm."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("healcore")


class ConsoleLog:
    """Lines on the logger `healcore`, at INFO and WARNING.

    Where those would be shown, they are left to the program's own logging. Where not, they go to
    standard error while the run lasts: most programs set up no logging, and libraries that do (absl
    is one) only let warnings through.

    Args:
        speaks: only one of several ranks does.
    """

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._handler: logging.Handler | None = None
        self._before = (_log.level, _log.propagate)

    def begin(self) -> None:
        """Makes sure that somebody listens."""
        shown = _log.hasHandlers() and _log.isEnabledFor(logging.INFO)
        if self._speaks and not shown:
            self._handler = logging.StreamHandler(sys.stderr)
            self._handler.setFormatter(logging.Formatter("healcore: %(message)s"))
            _log.addHandler(self._handler)
            self._before = (_log.level, _log.propagate)
            _log.setLevel(logging.INFO)
            _log.propagate = False

    def say(self, line: str) -> None:
        """What goes as planned."""
        if self._speaks:
            _log.info("%s", line)

    def warn(self, line: str) -> None:
        """What does not."""
        if self._speaks:
            _log.warning("%s", line)

    def end(self) -> None:
        """Leaves the logger as it was."""
        if self._handler is not None:
            _log.removeHandler(self._handler)
            level, _log.propagate = self._before
            _log.setLevel(level)
            self._handler = None
