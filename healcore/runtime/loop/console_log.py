"""The lines that a run shows on the terminal: per incident and rollback, not per alarm."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("healcore")


class ConsoleLog:
    """Lines on the logger `healcore`, at INFO and WARNING.

    If the program's logging is set up to show these levels, it shows the lines. Otherwise they go
    to standard error while the run lasts: most programs set up no logging, and libraries that do
    (absl is one) show warnings only.

    Args:
        enabled: only one of several ranks logs.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._handler: logging.Handler | None = None
        self._before = (_log.level, _log.propagate)

    def begin(self) -> None:
        """Adds a handler if nothing else would show the lines."""
        shown = _log.hasHandlers() and _log.isEnabledFor(logging.INFO)
        if self._enabled and not shown:
            self._handler = logging.StreamHandler(sys.stderr)
            self._handler.setFormatter(logging.Formatter("healcore: %(message)s"))
            _log.addHandler(self._handler)
            self._before = (_log.level, _log.propagate)
            _log.setLevel(logging.INFO)
            _log.propagate = False

    def info(self, line: str) -> None:
        """Logs at INFO."""
        if self._enabled:
            _log.info("%s", line)

    def warning(self, line: str) -> None:
        """Logs at WARNING."""
        if self._enabled:
            _log.warning("%s", line)

    def end(self) -> None:
        """Restores the logger."""
        if self._handler is not None:
            _log.removeHandler(self._handler)
            level, _log.propagate = self._before
            _log.setLevel(level)
            self._handler = None
