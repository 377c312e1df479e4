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
    """Whether a run is running, or how it ended: a value of `Ending`, or what a reader knows.

    The first values are written by the run itself in its event `end`. The others are what a reader
    concludes from a file without that event: a killed process cannot write its own end.
    """

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
    """Whether the orders of the policy were carried out.

    Reports depend on it: "3 steps were skipped" in mode HEAL is "would have been skipped" in the
    other modes.
    """

    HEAL = "heal"  # all orders were carried out
    OBSERVE = "observe"  # no order was carried out during the run
    REPLAY = "replay"  # the orders are from a later replay of recorded rows


@dataclass
class Incident:
    """Alarms with one onset, and what was done about them.

    An incident is a contiguous run of alarms: it begins at the first alarm, its onset, and is over
    after `incident.quiet_steps` steps without an alarm. One fault that lasts 50 steps is one
    incident, and spends one attempt of the budget. Its events are added in file order. A rollback
    for which no detector raised an alarm has an incident too, with number 0.
    """

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
        """Whether a rollback was carried out, or only ordered if the mode is not HEAL.

        A rollback that was ordered and declined in mode HEAL does not count, because the weights
        stayed as they were.
        """
        if self.mode is Mode.HEAL:
            return any(event.kind == "rollback" for event in self.responses)
        return "ROLLBACK" in self.action

    @property
    def end(self) -> float:
        """Step of the last alarm or order."""
        if self.last_step is None:
            return self.step
        return self.last_step

    def add(self, event: EventRecord) -> None:
        """Adds an alarm or order of the incident.

        Causes and actions accumulate. Batches, readings, evidence and diagnosis are those of the
        first event that has them, because the later alarms are mostly consequences of the first.

        Args:
            event: an event `alarm` or `order`.
        """
        self.step = max(self.step, float(event.step or 0))
        if event.observed:
            self.mode = Mode.OBSERVE
        self.cause = merge_names(self.cause, event.cause or ())
        self.action = merge_names(self.action, event.action or ())
        self.batches = self.batches or batch_ids(event)
        self.rows = self.rows or event.rows or ()
        if event.kind == "alarm":
            self.alarms += 1
            if event.skip:
                self.skipped += 1
            self.readings = self.readings or event.readings
            self.evidence = self.evidence or tuple(event.evidence or ())
            self.diagnosis = self.diagnosis or event.diagnosis or ""

    def add_response(self, event: EventRecord, *actions: str) -> None:
        """Adds an event of the response.

        Args:
            event: what was done: a rollback, a stop, a declined order, or a hook.
            *actions: names of its actions, such as "ROLLBACK".
        """
        self.responses = (*self.responses, event)
        self.action = merge_names(self.action, actions)

    def decline(self, event: EventRecord) -> None:
        """Adds the event `assessment` of a declined order.

        A policy may order the same action at each step of an incident. So the event is added only
        if the response before has another kind or another origin.

        Args:
            event: the event. Its field `by` says what asked for the order.
        """
        self.declined = True
        if self.responses:
            last = self.responses[-1]
            if (last.kind, last.by) == (event.kind, event.by):
                return
        self.add_response(event)

    def add_cut(self, event: EventRecord) -> None:
        """Adds a cut of the learning rate, from an event with the multiplier before and after.

        A rollback that cuts writes two events, `rollback` and `lr`. The second event about the same
        cut has no effect.

        Args:
            event: an event `rollback` or `lr`. Without the two multipliers it is no cut.
        """
        if event.lr_scale_before is None or event.lr_scale is None:
            return
        if not self.lr_path:
            self.lr_path = (event.lr_scale_before,)
        if event.lr_scale != self.lr_path[-1]:
            self.lr_path = (*self.lr_path, event.lr_scale)


def merge_names(names: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """Adds names to names, each once.

    Args:
        names: the names so far, in order.
        added: further names, of which some may be there already.

    Returns:
        The union, in order of first occurrence.
    """
    return tuple(dict.fromkeys((*names, *added)))


def batch_ids(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """Reads the batches of a step from its event.

    Args:
        event: any event. Without the field `batches` it names no batch.

    Returns:
        The (epoch, index) of each batch, in the order in which the step read them.
    """
    return tuple((epoch, index) for epoch, index in event.batches or ())


class Counts(NamedTuple):
    """Counts of a run or a replay, for reports and the postmortem.

    None means unknown, which is not 0: clips, for example, are not events, so only the postmortem
    of a run has their number.
    """

    incidents: int = 0
    rollbacks: int = 0  # carried out; without healing, incidents that would be rolled back
    skips: int = 0  # skipped steps, including undone steps
    clips: int | None = None  # steps with clipped gradients, or None if unknown
    alarms: int | None = None  # steps with a cause, or None if unknown
    lr_cuts: int = 0  # cuts of the learning rate, which only a live run counts


def by_name(*, observes: bool, **counts: int) -> dict[str, int]:
    """Names counts so that a reader cannot take an observed change for a change.

    Args:
        observes: whether the policy only observes, so that nothing was changed.
        **counts: name of a change, such as `skips` -> its number.

    Returns:
        The counts. With `observes` each count is 0, and "observed_skips" has the number of skips
        that the policy would have made.
    """
    if not observes:
        return counts
    named = dict.fromkeys(counts, 0)
    for name, number in counts.items():
        named[f"observed_{name}"] = number
    return named


def count_incidents(incidents: Sequence[Incident], /, **counts: int | None) -> Counts:
    """Counts incidents and their responses.

    Args:
        incidents: the incidents of one run or replay.
        **counts: fields of `Counts` that are known from elsewhere, which replace what is counted.

    Returns:
        The counts. An incident with number 0, which is only a rollback, counts as a rollback only.
    """
    return Counts(
        incidents=sum(incident.number > 0 for incident in incidents),
        rollbacks=sum(incident.rolled_back for incident in incidents),
        skips=sum(incident.skipped for incident in incidents),
    )._replace(**counts)


@dataclass
class RunProcess:
    """One process of a run: how it began, how it ended, and whether it still exists.

    A run that was killed and resumed has several processes, which write into the same events file.
    Each has an id of its own in its events.
    """

    id: str
    start: EventRecord | None = None  # None if the event is lost, for example in a torn line
    end: EventRecord | None = None
    last: EventRecord | None = None
    diagnosis: str = ""  # newest diagnosis in the events
    began: float | None = None  # monotonic clock of its first event, in seconds

    def add(self, event: EventRecord) -> None:
        """Adds an event of the process, in file order.

        Args:
            event: the next event. The diagnosis of an alarm belongs to its incident, and is not
                taken for the diagnosis of the process.
        """
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
        if self.began is None or self.last is None or self.last.mono is None:
            return None
        return self.last.mono - self.began

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
            The state by the event `end`. Without that event a killed process and a running process
            look the same in the file, so this machine is asked whether the process exists; UNKNOWN
            if that cannot be known here.
        """
        if self.end is not None:
            if self.end.ending is None:  # an ending of a newer healcore
                return RunState.ENDED
            return RunState(self.end.ending)
        process = self.identity()
        if process is None:
            return RunState.UNKNOWN
        gone = process.gone()
        if gone is None:
            return RunState.UNKNOWN
        return RunState.GONE if gone else RunState.RUNNING


class RunAttempt(NamedTuple):
    """Steps between two of: a start, a resume, a rollback.

    A rollback from step 9 to the checkpoint of step 4 ends an attempt and begins the next:

        attempt 0, first_step 0   0 1 2 3 4 5 6 7 8        left 9: steps 4 to 8 are undone
        attempt 1, first_step 4           4 5 6 7 8 9 ...
    """

    first_step: float
    origin: str
    """What began the attempt: "start", "process", "resume", "rollback", or the file of its rows."""
    left: float | None = None  # steps done when the previous attempt ended, or None if unknown
    skipped: int = 0  # batches that the rollback has skipped


@dataclass(eq=False, repr=False)
class Run:
    """A training run: its first process, and the processes that resumed from its checkpoints.

    A run is built from its events by `add`, one after the other and in file order. So the same code
    reads a file afterwards (`runs_of`) and follows a live run. What an event changes is in the
    method `_on_<kind>`.

    Examples:
        >>> for run in runs_of(healcore.events.read("run.events.jsonl").runs()):
        ...     print(run.state, run.counts().incidents)
    """

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
        for process in reversed(self.processes):
            if process.start is not None:
                return process.start
        return None

    @property
    def end(self) -> EventRecord | None:
        """Event `end` of the last process, or None."""
        if not self.processes:
            return None
        return self.processes[-1].end

    @property
    def state(self) -> RunState:
        """Whether the run is running, or how it ended."""
        if not self.processes:
            return RunState.UNKNOWN
        return self.processes[-1].state()

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
        """Adds an event.

        Args:
            event: the next event of the run, from `log.parse`.

        Returns:
            The event without fields of the wrong type.
        """
        record, invalid_fields = validate(event)
        kind = record.kind
        step = float(record.step or 0)
        if invalid_fields:
            self.malformed.append((record, invalid_fields))
        if not self.processes or record.run != self.processes[-1].id:
            origin = "process" if self.attempts else "start"
            self.attempts.append(RunAttempt(step, origin, self.step))
            self.processes.append(RunProcess(record.run))
            self.step = None
            self.lr_scale = None
        self.processes[-1].add(record)
        self._track_good(record)
        if kind in KINDS:
            self.newest[kind].append(record)
        if record.step is not None and not has(kind, Trait.CHECKPOINT):
            self.step = record.step
            if has(kind, Trait.JUDGED):  # the event has the step's index: one more step is done
                self.step += 1
        if record.lr_scale is not None:
            self.lr_scale = record.lr_scale
        self.settings |= record.settings or {}
        self.lost += record.lost or 0
        handler = getattr(self, f"_on_{kind}", None)
        if handler is not None:
            handler(record, step)
        return record

    def counts(self) -> Counts:
        """Counts incidents, rollbacks, skips and clips so far.

        Returns:
            The counts. Each may be too low, because not every alarm has an event; the postmortem,
            if it was added, has the exact numbers.
        """
        counts = count_incidents(
            self.incidents, incidents=self.incident_count, skips=self.skips, clips=self.clips
        )
        if self.rollbacks:  # one incident may have several rollbacks
            return counts._replace(rollbacks=len(self.rollbacks))
        return counts  # a policy that observes has only incidents that would be rolled back

    def add_postmortem(self, written: Mapping[str, Any]) -> None:
        """Adds the counts of a postmortem: clips, and skips without an event.

        Args:
            written: the JSON object of the postmortem file. Values that are no integers have no
                effect, because the file may be damaged.
        """
        for name in ("skips", "clips"):
            count = written.get(f"observed_{name}", written.get(name))
            if type(count) is int:
                setattr(self, name, max(getattr(self, name) or 0, count))

    def _track_good(self, event: EventRecord) -> None:
        """Updates the steps of the known-good checkpoints, which a rollback may abandon."""
        step = event.checkpoint
        if step is None:
            step = event.step
        if event.kind == "start" and event.store != self._store:
            self._store = event.store
            self._good.clear()
        elif event.kind == "good" and step is not None:
            self._good.add(step)
        elif event.kind in ("rollback", "resume") and step is not None:
            self._good = {good for good in self._good if good <= step}
        elif event.kind == "damaged" and step is not None and not event.other_copy:
            self._good.discard(step)
        if event.last_good is not None:
            self._good.add(event.last_good)

    def _undo(self, step: float) -> None:
        """Marks incidents from `step` on as undone."""
        for incident in self.incidents:
            if incident.onset_step >= step:
                incident.undone = True

    def _on_resume(self, event: EventRecord, step: float) -> None:
        first = step
        if event.checkpoint is not None:
            first = float(event.checkpoint)
        self._undo(first)
        self.attempts[-1] = self.attempts[-1]._replace(first_step=first, origin="resume")

    def _on_rollback(self, event: EventRecord, step: float) -> None:
        target = event.checkpoint
        if target is None:
            return
        self.step = target
        self.rollbacks.append(event)
        onset = _onset(event, step)
        if not self.incidents or self.incidents[-1].onset_step != onset:
            self._open(event, onset)  # better weights or a hook: a rollback without an incident
        last = self.incidents[-1]
        last.add_response(event, "ROLLBACK")
        skipped = batch_ids(event)
        # A dict as an ordered set: two rollbacks of an incident may skip the same batch.
        last.skipped_batches = tuple(dict.fromkeys((*last.skipped_batches, *skipped)))
        last.add_cut(event)
        self._undo(float(target))
        self.attempts.append(RunAttempt(float(target), "rollback", step, len(skipped)))

    def _on_incident(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count + 1, event.incident or 0)
        self._open(event, _onset(event, step))
        self.last_incident = self.incidents[-1]

    def _on_over(self, event: EventRecord, step: float) -> None:
        for incident in self.incidents:
            if incident.number == event.incident:
                incident.over = True

    def _on_alarm(self, event: EventRecord, step: float) -> None:
        if event.skip:
            self.skips += 1
        if event.incident:
            self._on_order(event, step)
        elif len(self.alarms_outside) < _MAX_OUTSIDE:
            self.alarms_outside[step] = tuple(event.cause or ())

    def _on_order(self, event: EventRecord, step: float) -> None:
        if not event.incident:
            return
        if not self.incidents or self.incidents[-1].number != event.incident:
            self._open(event, step)  # its event `incident` is lost
        self.last_incident = self.incidents[-1]
        self.last_incident.add(event)

    def _on_fault(self, event: EventRecord, step: float) -> None:
        self.answers[event.answer or ""] += 1

    def _on_hook(self, event: EventRecord, step: float) -> None:
        last = self._incident_of_attempt()
        if last is None or last.step != step:
            return
        overridden = event.ordered or ()
        last.action = tuple(name for name in last.action if name not in overridden)
        last.add_response(event, *(event.action or ()))

    def _on_lr(self, event: EventRecord, step: float) -> None:
        before = event.lr_scale_before
        after = event.lr_scale
        if before is None or after is None or not after < before:
            return
        # `why` marks a decrease to the limit of an earlier cut, which is not a new cut.
        if event.why is not None and "CUT_LR" not in (event.action or ()):
            return
        last = self._incident_of_attempt()
        if last is not None:
            last.add_cut(event)

    def _on_assessment(self, event: EventRecord, step: float) -> None:
        if event.verdict != "unknown":
            return
        self.declined += 1
        if self.last_incident is not None and not self.last_incident.undone:
            self.last_incident.decline(event)

    def _on_stop(self, event: EventRecord, step: float) -> None:
        if self.incidents:
            self.incidents[-1].add_response(event, "STOP")
            self.incidents[-1].declined = False

    def _on_end(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count, event.incidents or 0)

    def _incident_of_attempt(self) -> Incident | None:
        """The last incident, or None if it belongs to an earlier attempt."""
        if not self.incidents or self.incidents[-1].attempt != len(self.attempts) - 1:
            return None
        return self.incidents[-1]

    def _open(self, event: EventRecord, onset: float) -> None:
        """Adds the incident that begins with an event."""
        incident = Incident(
            number=0,
            attempt=len(self.attempts) - 1,
            onset_step=onset,
            step=max(onset, float(event.step or 0)),
            cause=tuple(event.cause or ()),
        )
        if event.kind != "rollback":  # its batches are the skipped batches
            incident.number = event.incident or self.incident_count
            incident.batches = batch_ids(event)
        self.incidents.append(incident)


def _onset(event: EventRecord, step: float) -> float:
    """The onset of the event's incident, or the event's step if the event has no incident."""
    if event.onset is None:
        return step
    return float(event.onset)


def is_continuation(events: Iterable[Event]) -> bool:
    """Whether a process resumed from a checkpoint of an earlier process.

    Args:
        events: the events of the process, by `seq`.

    Returns:
        True if the process says so before its first save or alarm. A process that trains first has
        begun a run of its own.
    """
    for event in events:
        if event["kind"] == "resume" or event.get("resumes") is True:
            return True
        if event["kind"] in ("save", "alarm", "incident"):
            return False
    return False


def runs_of(processes: Mapping[str, Sequence[Event]]) -> list[Run]:
    """Joins the processes of an events file into training runs.

    Args:
        processes: process id -> its events, from `History.runs`, in the order of their starts.

    Returns:
        The runs. A process that resumed belongs to the run before it.
    """
    runs: list[Run] = []
    for events in processes.values():
        if not runs or not is_continuation(events):
            runs.append(Run())
        for event in events:
            runs[-1].add(event)
    return runs
