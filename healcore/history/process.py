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
    first_mono: float | None = None  # smallest monotonic clock of its events, in seconds
    last_mono: float | None = None  # largest monotonic clock

    def add(self, event: EventRecord) -> None:
        """Adds an event, in file order."""
        self.last = event
        if event.kind == "start":
            self.start = event
        elif event.kind == "end":
            self.end = event
        if event.diagnosis is not None:
            self.diagnosis = event.diagnosis
        if event.mono is not None:
            first, last = self.first_mono, self.last_mono
            self.first_mono = event.mono if first is None else min(first, event.mono)
            self.last_mono = event.mono if last is None else max(last, event.mono)

    @property
    def seconds(self) -> float | None:
        """Duration in seconds by the monotonic clock, or None if unknown."""
        if self.first_mono is None or self.last_mono is None:
            return None
        return self.last_mono - self.first_mono

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
        gone = None if process is None else process.gone()
        if gone is None:
            return RunState.UNKNOWN
        return RunState.GONE if gone else RunState.RUNNING


class KnownGood:
    """Tracks the known-good checkpoints in the store of the run."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._store: str | None = None

    @property
    def newest(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        return max(self._steps, default=None)

    def add(self, event: EventRecord) -> None:
        """Adds an event, in file order."""
        step = event.step if event.checkpoint is None else event.checkpoint
        if event.kind == "start" and event.store != self._store:
            self._store = event.store
            self._steps.clear()
        elif event.kind == "good" and step is not None:
            self._steps.add(step)
        elif event.kind in ("rollback", "resume") and step is not None:
            self._steps = {good for good in self._steps if good <= step}
        elif event.kind == "damaged" and step is not None:
            self._steps.discard(step)
        if event.last_good is not None:
            self._steps.add(event.last_good)
