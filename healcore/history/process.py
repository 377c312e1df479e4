"""One process of a run: when it began, how it ended; and the checkpoints that it left."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from healcore.runtime.events.models import EventRecord
from healcore.runtime.events.process import Process


class RunState(enum.StrEnum):
    """How a run stands, or how it has ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    KILLED = "killed"
    ENDED = "ended"
    """It has ended, in a way that this version does not know."""
    GONE = "gone"
    """It has written no end, and its process is gone."""
    RUNNING = "running"
    UNKNOWN = "unknown"
    """It has written no end, and its process cannot be seen from here."""


@dataclass
class RunProcess:
    """One process of a run.

    Attributes:
        id: of its events.
        start: its event; None: a torn line has taken it, or a rotation.
        end: its event; None: it has written none.
        last: its last event.
        diagnosis: for a person, of the last event that has one.
        first_mono: monotonic clock of its first event that has one.
        last_mono: of its last.
    """

    id: str
    start: EventRecord | None = None
    end: EventRecord | None = None
    last: EventRecord | None = None
    diagnosis: str = ""
    first_mono: float | None = None
    last_mono: float | None = None

    def add(self, event: EventRecord) -> None:
        """The next event."""
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
        """How long it ran, by its monotonic clock; None: not known."""
        if self.first_mono is None or self.last_mono is None:
            return None
        return self.last_mono - self.first_mono

    def process(self) -> Process | None:
        """What the system knows it by; None: its start does not say."""
        start = self.start
        if start is None or start.host is None or start.pid is None:
            return None
        return Process(start.host, start.pid, start.boot, start.born)

    def state(self) -> RunState:
        """From its end, or else from whether the process is still there."""
        if self.end is not None:
            return RunState.ENDED if self.end.ending is None else RunState(self.end.ending)
        process = self.process()
        gone = None if process is None else process.gone()
        if gone is None:
            return RunState.UNKNOWN
        return RunState.GONE if gone else RunState.RUNNING


class KnownGood:
    """The known-good checkpoints of the store that was used last, from their events."""

    def __init__(self) -> None:
        self._steps: set[int] = set()
        self._store: str | None = None

    @property
    def newest(self) -> int | None:
        """Step of the newest; None: there is none."""
        return max(self._steps, default=None)

    def add(self, event: EventRecord) -> None:
        """The next event."""
        at = event.step if event.checkpoint is None else event.checkpoint
        if event.kind == "start" and event.store != self._store:
            self._store = event.store
            self._steps.clear()
        elif event.kind == "good" and at is not None:
            self._steps.add(at)
        elif event.kind in ("quarantine", "damaged") and at is not None:
            self._steps.discard(at)
        if event.last_good is not None:
            self._steps.add(event.last_good)
