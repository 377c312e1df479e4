"""Collects the events of one process of a run, and the run's known-good checkpoints."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from healcore.events.models import EventRecord
from healcore.events.process import Process


class RunState(enum.StrEnum):
    """Whether a run is running, or how it ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    REQUESTED = "requested"
    KILLED = "killed"
    ENDED = "ended"
    """The run ended in a way that this version of healcore does not know."""
    GONE = "gone"
    """The process no longer exists and has written no event `end`."""
    RUNNING = "running"
    UNKNOWN = "unknown"
    """No event `end`, and whether the process exists is unknown, for example on another host."""


@dataclass
class RunProcess:
    """One process of a run."""

    id: str
    start: EventRecord | None = None  # None if the event is lost, for example in a torn line
    end: EventRecord | None = None
    last: EventRecord | None = None
    diagnosis: str = ""  # newest diagnosis in the events
    began: float | None = None  # monotonic clock of its first event, in seconds

    def add(self, event: EventRecord) -> None:
        """Adds an event, in file order."""
        self.last = event
        if event.kind == "start":
            self.start = event
        elif event.kind == "end":
            self.end = event
        if event.diagnosis is not None:
            self.diagnosis = event.diagnosis
        if self.began is None:
            self.began = event.mono

    @property
    def seconds(self) -> float | None:
        """Duration in seconds by the monotonic clock, or None if unknown."""
        last = None if self.last is None else self.last.mono
        return None if last is None or self.began is None else last - self.began

    def process(self) -> Process | None:
        """Identity of the process, or None if the event `start` is missing."""
        start = self.start
        if start is None or start.host is None or start.pid is None:
            return None
        return Process(start.host, start.pid, start.boot, start.born)

    def state(self) -> RunState:
        """Returns the state by the event `end`, or else by whether the process exists."""
        if self.end is not None:
            return RunState.ENDED if self.end.ending is None else RunState(self.end.ending)
        process = self.process()
        states = {True: RunState.GONE, False: RunState.RUNNING, None: RunState.UNKNOWN}
        return states[None if process is None else process.gone()]
