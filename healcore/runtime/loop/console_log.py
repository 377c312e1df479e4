"""The lines that a run shows at the terminal: one per incident and rollback, not one per alarm."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("healcore")


class ConsoleLog:
    """Lines on the logger `healcore`, at INFO and WARNING.

    If the program's own logging shows those levels, it shows these lines too. Otherwise they go to
    standard error for as long as the run lasts: most programs set up no logging, and libraries that
    do (absl is one) show warnings only.

    Args:
        enabled: only one of several ranks logs.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._handler: logging.Handler | None = None
        self._before = (_log.level, _log.propagate)

    def begin(self) -> None:
        """Adds a handler where nothing would show these lines."""
        shown = _log.hasHandlers() and _log.isEnabledFor(logging.INFO)
        if self._enabled and not shown:
            self._handler = logging.StreamHandler(sys.stderr)
            self._handler.setFormatter(logging.Formatter("healcore: %(message)s"))
            _log.addHandler(self._handler)
            self._before = (_log.level, _log.propagate)
            _log.setLevel(logging.INFO)
            _log.propagate = False

    def info(self, line: str) -> None:
        """Logs what goes as planned."""
        if self._enabled:
            _log.info("%s", line)

    def warning(self, line: str) -> None:
        """Logs what does not."""
        if self._enabled:
            _log.warning("%s", line)

    def end(self) -> None:
        """Leaves the logger as it was."""
        if self._handler is not None:
            _log.removeHandler(self._handler)
            level, _log.propagate = self._before
            _log.setLevel(level)
            self._handler = None
