"""What a run reports: events in its file and to trackers, and lines on the console."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from healcore.core.printable import clean
from healcore.runtime.events import Log
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.trackers import Trackers

_LOCAL = frozenset({"problem", "damaged", "save_failed", "fault", "hook"})
"""Kinds of events that may come from one rank only."""
_console = logging.getLogger("healcore")


class _StandardError(logging.Handler):
    """Writes to the present `sys.stderr`, above a progress bar.

    A live display of rich replaces `sys.stderr` by a stream that knows of it; tqdm has a function.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            line = self.format(record)
            tqdm: Any = sys.modules.get("tqdm.std")  # a program without it has no bar of it
            if tqdm is None:
                print(line, file=sys.stderr, flush=True)
            else:
                tqdm.tqdm.write(line, file=sys.stderr)
        except Exception:
            self.handleError(record)


class RunLog:
    """Events, to the file and to trackers, and lines on the logger `healcore`, of one rank.

    The lines are at INFO and WARNING. If the program's logging is set up to show these levels, it
    shows the lines. Otherwise they go to standard error while the run lasts: most programs set up
    no logging, and libraries that do (absl is one) show warnings only.
    """

    def __init__(
        self,
        events: Log,
        *,
        console: bool,
        trackers: Trackers | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.events = events
        self._hooks = Hooks() if hooks is None else hooks
        self.trackers = Trackers() if trackers is None else trackers
        self._enabled = console
        self.on_local: Callable[[str], object] | None = None
        """Called with what one rank may be the only one to see: the others must hear of it."""
        self._handler: logging.Handler | None = None
        self._before = (_console.level, _console.propagate)

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Writes an event, see `Log.write`, and passes it to the trackers and the user's hooks."""
        self.events.write(kind, step=step, **fields)
        if self.on_local is not None and kind in _LOCAL:
            text = fields.get("problem") or f"{fields.get('hook')} returns {fields.get('action')}"
            self.on_local(f"{kind}: {text}")
        self.trackers.event(kind, step=step, **fields)
        for problem in self._hooks.on_event(kind, {"step": step, **fields}):
            self.problem(step, problem)

    def problem(self, step: int | None, problem: str) -> None:
        """Writes an event, and logs a warning."""
        self.event("problem", step=step, problem=problem)
        self.warning(problem)

    def info(self, line: str) -> None:
        """Logs at INFO."""
        if self._enabled:
            _console.info("%s", clean(line))

    def warning(self, line: str) -> None:
        """Logs at WARNING."""
        if self._enabled:
            _console.warning("%s", clean(line))

    def report_trackers(self, step: int) -> None:
        """Reports what has failed in trackers since the last call."""
        for problem in self.trackers.problems():
            self.problem(step, problem)

    def attach_console(self) -> None:
        """Adds a handler if nothing else would show the lines."""
        shown = _console.hasHandlers() and _console.isEnabledFor(logging.INFO)
        if self._enabled and not shown:
            self._handler = _StandardError()
            self._handler.setFormatter(logging.Formatter("healcore: %(message)s"))
            _console.addHandler(self._handler)
            self._before = (_console.level, _console.propagate)
            _console.setLevel(logging.INFO)
            _console.propagate = False

    def detach_console(self) -> None:
        """Undoes `attach_console`."""
        if self._handler is not None:
            _console.removeHandler(self._handler)
            level, _console.propagate = self._before
            _console.setLevel(level)
            self._handler = None
