"""Reads a training run from its events: processes, attempts, incidents and counts."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healcore.events.log import Event
from healcore.events.models import EventRecord, EvidenceRecord, ReadingsRecord, validate
from healcore.events.process import Process
from healcore.events.schema import KINDS, Trait, has

MOST_ALARMS = 100  # limit of alarms with an event: per incident, and in total outside of incidents
_MAX_OUTSIDE = 1000  # limit of listed alarms outside of incidents
_MAX_NEWEST = 20  # limit of kept events of a kind: the newest ones


class RunState(enum.StrEnum):
    """Whether a run is running, or how it ended: a value of `Ending`, or what a reader knows."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    INTERRUPTED = "interrupted"
    REQUESTED = "requested"
    KILLED = "killed"
    ENDED = "ended"  # the run ended in a way that this version of healcore does not know
    GONE = "gone"  # the process no longer exists and has written no event `end`
    RUNNING = "running"
    UNKNOWN = "unknown"
    """No event `end`, and whether the process exists is unknown, for example on another host."""


class Mode(enum.StrEnum):
    """Whether the orders of the policy were carried out."""

    HEAL = "heal"  # all orders were carried out
    OBSERVE = "observe"  # no order was carried out during the run
    REPLAY = "replay"  # the orders are from a later replay of recorded rows


@dataclass
class Incident:
    """Alarms with one onset. Events are added in file order."""

    number: int  # from 1, over the whole run; 0 for a rollback without an incident
    attempt: int
    onset_step: float
    step: float  # step of the order, or of the last alarm
    cause: tuple[str, ...] = ()
    action: tuple[str, ...] = ()  # orders to the host, carried out only in mode HEAL
    mode: Mode = Mode.HEAL
    alarms: int = 0  # alarms with an event
    skipped: int = 0  # skipped steps
    clipped: int | None = None  # steps with clipped gradients, or None if not counted
    declined: bool = False  # the last order was declined for lack of evidence or budget
    responses: tuple[EventRecord, ...] = ()  # events: rollbacks, hooks, declined, stop
    lr_path: tuple[float, ...] = ()  # learning-rate multipliers: the first, and after each cut
    batches: tuple[tuple[int, int], ...] = ()  # (epoch, index) of the batches of the first step
    rows: Sequence[list[int]] = ()  # for each of `batches` its first rows of the dataset, if known
    skipped_batches: tuple[tuple[int, int], ...] = ()  # (epoch, index), skipped by a rollback
    evidence: tuple[EvidenceRecord, ...] = ()  # tensors with unusual gradients, the worst first
    readings: ReadingsRecord | None = None  # readings of the first alarm
    diagnosis: str = ""  # explanation of the first alarm that has its own, or empty
    last_step: float | None = None  # step of the last alarm, or None if equal to `step`
    over: bool = False  # has an event `over`
    undone: bool = False  # the run rolled back to before the onset

    @property
    def capped(self) -> bool:
        """Whether some alarms may have no event, so that `skipped` is a lower bound."""
        return self.alarms >= MOST_ALARMS

    @property
    def rolled_back(self) -> bool:
        """Whether a rollback was carried out, or only ordered if the mode is not HEAL."""
        if self.mode is Mode.HEAL:
            return any(event.kind == "rollback" for event in self.responses)
        return "ROLLBACK" in self.action

    @property
    def end(self) -> float:
        """Step of the last alarm or order."""
        return self.step if self.last_step is None else self.last_step

    def add(self, event: EventRecord) -> None:
        """Adds an alarm or order of the incident."""
        self.step = max(self.step, float(event.step or 0))
        if event.observed:
            self.mode = Mode.OBSERVE
        self.cause = merge_names(self.cause, event.cause or ())
        self.action = merge_names(self.action, event.action or ())
        self.batches = self.batches or batch_ids(event)
        self.rows = self.rows or event.rows or ()
        if event.kind == "alarm":
            self.alarms += 1
            self.skipped += bool(event.skip)
            self.readings = self.readings or event.readings
            self.evidence = self.evidence or tuple(event.evidence or ())
            self.diagnosis = self.diagnosis or event.diagnosis or ""

    def add_response(self, event: EventRecord, *actions: str) -> None:
        """Adds an event of the response, and the names of its actions."""
        self.responses = (*self.responses, event)
        self.action = merge_names(self.action, actions)

    def decline(self, event: EventRecord) -> None:
        """Adds the event of a declined order, once if one order after the other is declined."""
        self.declined = True
        if [(last.kind, last.by) for last in self.responses[-1:]] != [(event.kind, event.by)]:
            self.add_response(event)

    def add_cut(self, event: EventRecord) -> None:
        """Adds a cut of the learning rate. A second event about the same cut has no effect."""
        if event.lr_scale_before is not None and event.lr_scale is not None:
            path = self.lr_path or (event.lr_scale_before,)
            self.lr_path = path if event.lr_scale == path[-1] else (*path, event.lr_scale)


def merge_names(names: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """The union of the names, in order of first occurrence."""
    return tuple(dict.fromkeys((*names, *added)))


def batch_ids(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """The (epoch, index) of each batch in `event.batches`."""
    return tuple((epoch, index) for epoch, index in event.batches or ())


class Counts(NamedTuple):
    """Counts of a run or a replay."""

    incidents: int = 0
    rollbacks: int = 0  # carried out; without healing, incidents that would be rolled back
    skips: int = 0  # skipped steps, including undone steps
    clips: int | None = None  # steps with clipped gradients, or None if unknown
    alarms: int | None = None  # steps with a cause, or None if unknown
    lr_cuts: int = 0  # cuts of the learning rate, which only a live run counts


def by_name(*, observes: bool, **counts: int) -> dict[str, int]:
    """Name -> number of changes to the run; with `observes` all 0, and `observed_skips`, ..."""
    observed = {f"observed_{name}": number for name, number in counts.items()}
    return dict.fromkeys(counts, 0) | observed if observes else counts


def count_incidents(incidents: Sequence[Incident], /, **counts: int | None) -> Counts:
    """Counts incidents and their responses. `counts` sets further fields or replaces counts."""
    return Counts(
        incidents=sum(incident.number > 0 for incident in incidents),
        rollbacks=sum(incident.rolled_back for incident in incidents),
        skips=sum(incident.skipped for incident in incidents),
    )._replace(**counts)


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
        if event.kind != "alarm":
            self.diagnosis = event.diagnosis or self.diagnosis
        if self.began is None:
            self.began = event.mono

    @property
    def seconds(self) -> float | None:
        """Duration in seconds by the monotonic clock, or None if unknown."""
        last = None if self.last is None else self.last.mono
        return None if last is None or self.began is None else last - self.began

    def identity(self) -> Process | None:
        """Identity of the process, or None if the event `start` is missing."""
        start = self.start
        if start is None or start.host is None or start.pid is None:
            return None
        return Process(start.host, start.pid, start.boot, start.born)

    def state(self) -> RunState:
        """The state by the event `end`, or else by whether the process exists."""
        if self.end is not None:
            return RunState.ENDED if self.end.ending is None else RunState(self.end.ending)
        process = self.identity()
        states = {True: RunState.GONE, False: RunState.RUNNING, None: RunState.UNKNOWN}
        return states[None if process is None else process.gone()]


class RunAttempt(NamedTuple):
    """Steps between two of: a start, a resume, a rollback."""

    first_step: float
    origin: str
    """What began the attempt: "start", "process", "resume", "rollback", or the file of its rows."""
    left: float | None = None  # steps done when the attempt before ended, or None if unknown
    skipped: int = 0  # batches that the rollback has skipped


@dataclass(eq=False, repr=False)
class Run:
    """A training run: its first process, and the processes that resumed from its checkpoints."""

    processes: list[RunProcess] = field(default_factory=list)
    attempts: list[RunAttempt] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    rollbacks: list[EventRecord] = field(default_factory=list)
    malformed: list[tuple[EventRecord, list[str]]] = field(default_factory=list)
    """Events with fields of the wrong type, and the names of these fields."""
    newest: dict[str, deque[EventRecord]] = field(
        default_factory=lambda: {kind: deque(maxlen=_MAX_NEWEST) for kind in KINDS}
    )
    """Kind -> its newest events."""
    answers: Counter[str] = field(default_factory=Counter)  # response to faults -> faults
    settings: dict[str, Any] = field(default_factory=dict)  # of the program, newest values
    step: int | None = None  # steps done
    lr_scale: float | None = None  # current multiplier of the learning rate
    last_incident: Incident | None = None  # last incident that has an event or an alarm
    alarms_outside: dict[float, tuple[str, ...]] = field(default_factory=dict)
    """Step -> causes, of the first alarms outside of incidents."""
    declined: int = 0  # orders that were declined
    incident_count: int = 0  # including incidents whose events were rotated away
    skips: int = 0  # skipped steps, including undone steps
    clips: int | None = None  # steps with clipped gradients, or None without a postmortem
    lost: int = 0  # events that could not be written

    def __post_init__(self) -> None:
        self._good: set[int] = set()  # steps of the known-good checkpoints in the store
        self._store: str | None = None

    @property
    def start(self) -> EventRecord | None:
        """Newest event `start`, or None."""
        return next((p.start for p in reversed(self.processes) if p.start), None)

    @property
    def end(self) -> EventRecord | None:
        """Event `end` of the last process, or None."""
        return self.processes[-1].end if self.processes else None

    @property
    def state(self) -> RunState:
        """Whether the run is running, or how it ended."""
        return self.processes[-1].state() if self.processes else RunState.UNKNOWN

    @property
    def last_good(self) -> int | None:
        """Step of the newest known-good checkpoint, or None."""
        return max(self._good, default=None)

    @property
    def observes(self) -> bool:
        """Whether the policy only observes."""
        start = self.start
        return start is not None and start.mode == "observe"

    def add(self, event: Mapping[str, Any]) -> EventRecord:
        """Adds an event from `log.parse`. Returns the event without fields of the wrong type."""
        record, invalid_fields = validate(event)
        kind, step = record.kind, float(record.step or 0)
        if invalid_fields:
            self.malformed.append((record, invalid_fields))
        if not self.processes or record.run != self.processes[-1].id:
            origin = "process" if self.attempts else "start"
            self.attempts.append(RunAttempt(step, origin, self.step))
            self.processes.append(RunProcess(record.run))
            self.step = self.lr_scale = None
        self.processes[-1].add(record)
        self._track_good(record)
        if kind in KINDS:
            self.newest[kind].append(record)
        if record.step is not None and not has(kind, Trait.CHECKPOINT):
            self.step = record.step + has(kind, Trait.JUDGED)
        if record.lr_scale is not None:
            self.lr_scale = record.lr_scale
        self.settings |= record.settings or {}
        self.lost += record.lost or 0
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(record, step)
        return record

    def counts(self) -> Counts:
        """Counts of the run; each may be too low, because not every alarm has an event."""
        counts = count_incidents(
            self.incidents, incidents=self.incident_count, skips=self.skips, clips=self.clips
        )
        # One incident may have several rollbacks. A policy that observes has incidents only.
        return counts._replace(rollbacks=len(self.rollbacks) or counts.rollbacks)

    def add_postmortem(self, written: Mapping[str, Any]) -> None:
        """Adds the well-formed counts of a postmortem: clips, and skips without an event."""
        for name in ("skips", "clips"):
            count = written.get(f"observed_{name}", written.get(name))
            if type(count) is int:
                setattr(self, name, max(getattr(self, name) or 0, count))

    def _track_good(self, event: EventRecord) -> None:
        step = event.step if event.checkpoint is None else event.checkpoint
        if event.kind == "start" and event.store != self._store:
            self._store = event.store
            self._good.clear()
        elif event.kind == "good" and step is not None:
            self._good.add(step)
        elif event.kind in ("rollback", "resume") and step is not None:
            self._good = {good for good in self._good if good <= step}
        elif event.kind == "damaged" and step is not None:
            self._good.discard(step)
        if event.last_good is not None:
            self._good.add(event.last_good)

    def _undo(self, step: float) -> None:
        """Marks incidents from `step` on as undone."""
        for incident in self.incidents:
            incident.undone |= incident.onset_step >= step

    def _on_resume(self, event: EventRecord, step: float) -> None:
        first = step if event.checkpoint is None else float(event.checkpoint)
        self._undo(first)
        self.attempts[-1] = self.attempts[-1]._replace(first_step=first, origin="resume")

    def _on_rollback(self, event: EventRecord, step: float) -> None:
        target = event.checkpoint
        if target is None:
            return
        self.step = target
        self.rollbacks.append(event)
        onset = step if event.onset is None else float(event.onset)
        if not self.incidents or self.incidents[-1].onset_step != onset:
            self._open(event, onset)  # better weights or a hook: a rollback without an incident
        last = self.incidents[-1]
        last.add_response(event, "ROLLBACK")
        last.skipped_batches = tuple(dict.fromkeys((*last.skipped_batches, *batch_ids(event))))
        last.add_cut(event)
        self._undo(float(target))
        skipped = len(batch_ids(event))
        self.attempts.append(RunAttempt(float(target), "rollback", step, skipped))

    def _on_incident(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count + 1, event.incident or 0)
        self._open(event, step if event.onset is None else float(event.onset))
        self.last_incident = self.incidents[-1]

    def _on_over(self, event: EventRecord, step: float) -> None:
        for incident in self.incidents:
            incident.over |= incident.number == event.incident

    def _on_alarm(self, event: EventRecord, step: float) -> None:
        self.skips += bool(event.skip)
        if event.incident:
            self._on_order(event, step)
        elif len(self.alarms_outside) < _MAX_OUTSIDE:
            self.alarms_outside[step] = tuple(event.cause or ())

    def _on_order(self, event: EventRecord, step: float) -> None:
        if event.incident:
            if not self.incidents or self.incidents[-1].number != event.incident:
                self._open(event, step)  # its event `incident` is lost
            self.last_incident = self.incidents[-1]
            self.last_incident.add(event)

    def _on_fault(self, event: EventRecord, step: float) -> None:
        self.answers[event.answer or ""] += 1

    def _on_hook(self, event: EventRecord, step: float) -> None:
        last = self.incidents[-1] if self.incidents else None
        if last is not None and (last.attempt, last.step) == (len(self.attempts) - 1, step):
            ordered = event.ordered or ()
            last.action = tuple(name for name in last.action if name not in ordered)
            last.add_response(event, *(event.action or ()))

    def _on_lr(self, event: EventRecord, step: float) -> None:
        before, after = event.lr_scale_before, event.lr_scale
        if before is None or after is None:
            return
        # `why` marks a decrease to the limit of an earlier cut, which is not a new cut.
        cut = after < before and (event.why is None or "CUT_LR" in (event.action or ()))
        if cut and self.incidents and self.incidents[-1].attempt == len(self.attempts) - 1:
            self.incidents[-1].add_cut(event)

    def _on_assessment(self, event: EventRecord, step: float) -> None:
        if event.verdict == "unknown":
            self.declined += 1
            if self.last_incident is not None and not self.last_incident.undone:
                self.last_incident.decline(event)

    def _on_stop(self, event: EventRecord, step: float) -> None:
        if self.incidents:
            self.incidents[-1].add_response(event, "STOP")
            self.incidents[-1].declined = False

    def _on_end(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count, event.incidents or 0)

    def _open(self, event: EventRecord, onset: float) -> None:
        self.incidents.append(
            Incident(
                number=0 if event.kind == "rollback" else event.incident or self.incident_count,
                attempt=len(self.attempts) - 1,
                onset_step=onset,
                step=max(onset, float(event.step or 0)),
                cause=tuple(event.cause or ()),
                batches=() if event.kind == "rollback" else batch_ids(event),
            )
        )


def is_continuation(events: Iterable[Event]) -> bool:
    """Whether a process resumed from a checkpoint of an earlier process, by its events."""
    for event in events:
        if event["kind"] == "resume" or event.get("resumes") is True:
            return True
        if event["kind"] in ("save", "alarm", "incident"):
            return False
    return False


def runs_of(processes: Mapping[str, Sequence[Event]]) -> list[Run]:
    """Joins the processes of an events file (process id -> events) into training runs."""
    runs: list[Run] = []
    for events in processes.values():
        if not runs or not is_continuation(events):
            runs.append(Run())
        for event in events:
            runs[-1].add(event)
    return runs
