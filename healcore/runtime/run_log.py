"""What a run reports: events in its file and to trackers, and lines on the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from healcore import console
from healcore.console import Console
from healcore.events import Log
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.trackers import Trackers

_LOCAL = frozenset({"problem", "damaged", "save_failed", "fault", "hook"})
"""Kinds of events that may come from one rank only."""


class RunLog:
    """Events, to the file and to trackers, and lines for people, of one rank.

    The lines are at INFO and WARNING; see `healcore.console` for where they go. A `silent` rank
    has none.
    """

    def __init__(
        self,
        events: Log,
        *,
        console: Console = "auto",
        silent: bool = False,
        trackers: Trackers | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.events = events
        self._hooks = Hooks() if hooks is None else hooks
        self.trackers = Trackers() if trackers is None else trackers
        self._console: Console = console
        self._silent = silent
        self.answered: Counter[str] = Counter()
        """Word of a rule for faults -> how often it was the answer."""
        self.on_local: Callable[[str], object] | None = None
        """Called with what one rank may be the only one to see: the others must hear of it."""

    def event(self, kind: str, *, step: int | None, **fields: Any) -> None:
        """Writes an event, see `Log.write`, and passes it to the trackers and the user's hooks."""
        if kind == "fault" and fields.get("answer"):
            self.answered[fields["answer"]] += 1
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
        if not self._silent:
            console.info(line, self._console)

    def warning(self, line: str) -> None:
        """Logs at WARNING."""
        if not self._silent:
            console.warning(line, self._console)

    def report_trackers(self, step: int) -> None:
        """Reports what has failed in trackers since the last call."""
        for problem in self.trackers.problems():
            self.problem(step, problem)
