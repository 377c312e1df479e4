"""`RunHistory`: what happened in a training run, as its list of events with folds over it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healcore.events.json_lines import Event
from healcore.events.kinds import Trait, has
from healcore.events.models import Ending, EventRecord, validate
from healcore.events.process import Process
from healcore.history.incidents import Counts, Incident, incidents_of

_MAX_EVENTS = 10_000
"""Limit of the kept events of a run, of about 6 kB each: the newest ones."""
_ROUTINE = ("save", "good")
"""Kinds of events that a healthy run writes again and again. Only their checkpoints are kept."""


class RunState(enum.StrEnum):
    """Whether a run is running, or how it ended.

    The first values are written by the run itself in its event `end`. The others are what a reader
    concludes from a file without that event: a killed process cannot write its own end.
    """

    COMPLETED = Ending.COMPLETED
    STOPPED = Ending.STOPPED
    EXCEPTION = Ending.EXCEPTION
    SIGNAL = Ending.SIGNAL
    INTERRUPTED = Ending.INTERRUPTED
    REQUESTED = Ending.REQUESTED
    KILLED = Ending.KILLED
    ENDED = "ended"
    """The run ended in a way that this version of healcore does not know."""
    GONE = "gone"
    """The process no longer exists and has written no event `end`."""
    RUNNING = "running"
    UNKNOWN = "unknown"
    """No event `end`, and whether the process exists is unknown, for example on another host."""


@dataclass
class RunProcess:
    """One process of a run: how it began, how it ended, and whether it still exists.

    A run that was killed and resumed has several processes, which write into the same events file.
    The events of each process have its id.
    """

    id: str
    """Id of the process, the field `run` of its events."""
    first: EventRecord
    """Its first event of any kind."""
    last: EventRecord
    """Its newest event of any kind."""
    start: EventRecord | None = None
    """The event of the start, or None if it is lost, for example in a torn line."""
    end: EventRecord | None = None
    """The event of the end, or None for a process that was killed or still runs."""

    @property
    def seconds(self) -> float | None:
        """Duration in seconds by the monotonic clock, or None if unknown."""
        if self.first.mono is None or self.last.mono is None:
            return None
        return self.last.mono - self.first.mono

    def identity(self) -> Process | None:
        """Identifies the process on its machine.

        Returns:
            Host, process id and start time, because a process id is used again after its process
            has ended. None if the event `start` is missing.
        """
        start = self.start
        if start is None or start.host is None or start.pid is None:
            return None
        return Process(start.host, start.pid, start.boot, start.born)

    def state(self) -> RunState:
        """Finds out how the process ended, or whether it is still running.

        Returns:
            The state by the event `end`. Without this event a killed process and a running process
            look the same in the file. Then the operating system knows whether the process exists.
            UNKNOWN if the process ran on another machine.
        """
        if self.end is not None:
            # Without a value it is an ending of a newer healcore.
            return RunState(self.end.ending or RunState.ENDED)
        process = self.identity()
        gone = None if process is None else process.gone()
        if gone is None:
            return RunState.UNKNOWN
        return RunState.GONE if gone else RunState.RUNNING


class RunAttempt(NamedTuple):
    """The steps of a run from one start, resume or rollback to the next.

    A rollback from step 9 to the checkpoint of step 4 ends an attempt and begins the next:

        attempt 0, first_step 0   0 1 2 3 4 5 6 7 8        left 9: steps 4 to 8 are undone
        attempt 1, first_step 4           4 5 6 7 8 9 ...
    """

    first_step: float
    """Step at which the attempt begins."""
    origin: str
    """What began the attempt: "start", "process", "resume", "rollback", or the file of its rows."""
    left: float | None = None
    """Steps done when the previous attempt ended, or None if unknown."""
    skipped: int = 0
    """Batches that the rollback has skipped."""
    killed: bool = False
    """Whether the process before was killed, so that `left` is a lower limit."""


@dataclass(eq=False, repr=False)
class RunHistory:
    """What happened in a training run, by the events of its first process and of all restarts.

        for run in runs_of(healcore.events.read("run.events.jsonl").by_process()):
            print(run.state, run.counts().incidents)

    `add` adds the events one by one, in file order. So the same code reads a file afterwards
    (`runs_of`) and follows a live run (`RunLog`). All that a reader asks is a fold over `events`.
    """

    events: deque[EventRecord] = field(default_factory=lambda: deque(maxlen=_MAX_EVENTS))
    """The newest events, oldest first, without saves. A restart repeats the steps after its
    checkpoint, so their alarms in the process before are not listed."""
    processes: list[RunProcess] = field(default_factory=list)
    """All processes, the first start first."""
    attempts: list[RunAttempt] = field(default_factory=list)
    """All attempts, oldest first."""
    malformed: list[tuple[EventRecord, list[str]]] = field(default_factory=list)
    """Events with fields of the wrong type, and the names of these fields."""
    checkpoints: dict[int, bool] = field(default_factory=dict)
    """Step of each checkpoint that is not abandoned -> whether it is known-good."""
    step: int | None = None
    """Steps done."""
    lost: int = 0
    """Events that could not be written."""

    def add(self, event: Mapping[str, Any]) -> EventRecord:
        """Adds an event.

        Args:
            event: the next event of the run, from `healcore.events.log.parse`.

        Returns:
            The event without fields of the wrong type.
        """
        record, invalid_fields = validate(event)
        if invalid_fields:
            self.malformed.append((record, invalid_fields))
        if not self.processes or record.run != self.processes[-1].id:
            origin = "process" if self.attempts else "start"
            killed = bool(self.processes) and self.processes[-1].end is None
            self.attempts.append(RunAttempt(record.step or 0, origin, self.step, killed=killed))
            self.processes.append(RunProcess(record.run, record, record))
            self.step = None
        self.processes[-1].last = record
        self.lost += record.lost or 0
        if record.step is not None and not has(record.kind, Trait.CHECKPOINT):
            # A judged event has the step's index: one more step is done.
            self.step = record.step + has(record.kind, Trait.JUDGED)
        if record.kind == "rollback" and record.checkpoint is None:
            return record  # damaged
        self._note(record)
        if record.kind not in _ROUTINE:
            self.events.append(record)
        return record

    def _note(self, event: EventRecord) -> None:
        """Updates checkpoints, process and attempts."""
        process, done = self.processes[-1], event.step or 0
        step = done if event.checkpoint is None else event.checkpoint
        match event.kind:
            case "start":
                if self.start is not None and self.start.store != event.store:
                    self.checkpoints.clear()
                process.start = event
            case "save" | "good":
                self.checkpoints[step] = event.kind == "good"
            case "save_failed":
                self.checkpoints.pop(step, None)
            case "damaged" if not event.other_copy and step in self.checkpoints:
                self.checkpoints[step] = False
            case "resume":
                self._forget_from(step)
                self.attempts[-1] = self.attempts[-1]._replace(first_step=step, origin="resume")
            case "rollback":
                skipped = len(event.batches or ())
                self.attempts.append(RunAttempt(step, "rollback", done, skipped))
                self.step = step
            case "end":
                process.end = event
        if event.kind in ("rollback", "resume"):  # later checkpoints are abandoned
            kept = {saved: good for saved, good in self.checkpoints.items() if saved <= step}
            self.checkpoints = kept
        if event.last_good is not None:
            self.checkpoints[event.last_good] = True

    def _forget_from(self, step: int) -> None:
        """Forgets the judged steps from `step` on since the last rollback: a restart repeats them.

        The restart decides again about damage that its checkpoint does not know. A checkpoint to
        which the run was rolled back knows of all that happened until then.
        """
        later: list[EventRecord] = []
        while self.events and self.events[-1].kind not in ("rollback", "resume"):
            event = self.events.pop()
            if not has(event.kind, Trait.JUDGED) or (event.step or 0) < step:
                later.append(event)
        self.events.extend(reversed(later))

    # -- folds ------------------------------------------------------------------------------------

    def of(self, *kinds: str) -> list[EventRecord]:
        """The events of some kinds, oldest first."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def start(self) -> EventRecord | None:
        """Newest event `start`, or None."""
        return next((each.start for each in reversed(self.processes) if each.start), None)

    @property
    def end(self) -> EventRecord | None:
        """Event `end` of the last process, or None."""
        return self.processes[-1].end if self.processes else None

    @property
    def state(self) -> RunState:
        """Whether the run is running, or how it ended."""
        return self.processes[-1].state() if self.processes else RunState.UNKNOWN

    @property
    def observes(self) -> bool:
        """Whether the policy only observes."""
        return self.start is not None and self.start.mode == "observe"

    @property
    def last_good(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        return max((step for step, good in self.checkpoints.items() if good), default=None)

    @property
    def last_saved(self) -> int | None:
        """Step of the newest checkpoint that no rollback and no restart has abandoned, or None."""
        return max(self.checkpoints, default=None)

    @property
    def lr_scale(self) -> float | None:
        """Newest multiplier of the learning rate in the last process, or None."""
        for event in reversed(self.events):
            if event.run == self.processes[-1].id and event.lr_scale is not None:
                return event.lr_scale
        return None

    @property
    def rollbacks(self) -> list[EventRecord]:
        """The events `rollback`, oldest first."""
        return self.of("rollback")

    @property
    def steps_lost(self) -> int:
        """Steps that rollbacks have undone and that were not repeated."""
        return sum(rollback.steps_lost or 0 for rollback in self.rollbacks)

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, oldest first."""
        return incidents_of(self.events)

    @property
    def last_incident(self) -> Incident | None:
        """Last incident that has an event or an alarm."""
        return next((each for each in reversed(self.incidents) if each.number), None)

    def alarms_outside(self, *, undone: bool = True) -> dict[float, tuple[str, ...]]:
        """Finds the alarms outside of incidents.

        Args:
            undone: whether to include alarms that a rollback has undone and that have not come
                again.

        Returns:
            Step -> causes.
        """
        alarms: dict[float, tuple[str, ...]] = {}
        for event in self.of("alarm", "rollback"):
            if event.kind == "alarm" and not event.incident:
                alarms[event.step or 0] = tuple(event.cause or ())
            elif event.kind == "rollback" and not undone:
                kept = [step for step in alarms if step < (event.checkpoint or 0)]
                alarms = {step: alarms[step] for step in kept}
        return alarms

    @property
    def unrepaired(self) -> tuple[int, ...]:
        """Onsets of the damage that the weights have.

        The damage has come back after each rollback, or no checkpoint could be restored.
        """
        damage: set[int] = set()
        for event in self.of("assessment"):
            if event.verdict == "accepted" and event.onset is not None:
                damage.add(event.onset)
            elif event.verdict == "recovered":
                damage.discard(event.onset or 0)
        return tuple(sorted(damage))

    @property
    def losses_before(self) -> dict[int, float]:
        """Onset of accepted damage -> mean loss before it, where known."""
        known = [each for each in self.of("assessment") if each.loss_before is not None]
        return {each.onset: each.loss_before for each in known}

    def counts(self) -> Counts:
        """Counts incidents, rollbacks and skips so far.

        Returns:
            The counts. Each may be too low, because not every alarm has an event; the postmortem
            has the exact numbers.
        """
        incidents = self.incidents
        # The events of older incidents may have been rotated away.
        numbers = [each.number for each in incidents]
        at_end = [event.incidents or 0 for event in self.of("end")]
        # One incident may have several rollbacks; a policy that observes has only incidents.
        ordered = sum(incident.rolled_back for incident in incidents)
        return Counts(
            incidents=max([*numbers, *at_end, 0]),
            rollbacks=len(self.rollbacks) or ordered,
            skips=sum(bool(event.skip) for event in self.of("alarm")),
        )


def _is_continuation(events: Iterable[Event]) -> bool:
    """Whether a process says that it resumes a run, before its first save or alarm.

    A process that trains first has begun another run.
    """
    for event in events:
        if event["kind"] == "resume" or event.get("resumes") is True:
            return True
        if event["kind"] in ("save", "alarm"):
            return False
    return False


def runs_of(processes: Mapping[str, Sequence[Event]]) -> list[RunHistory]:
    """Joins the processes of an events file into training runs.

    Args:
        processes: process id -> its events, in the order of the starts. `EventsFile.by_process`
            returns them.

    Returns:
        The runs. A process that resumed belongs to the run before it.
    """
    runs: list[RunHistory] = []
    for events in processes.values():
        if not runs or not _is_continuation(events):
            runs.append(RunHistory())
        for event in events:
            runs[-1].add(event)
    return runs
