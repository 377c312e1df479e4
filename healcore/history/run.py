"""Reads a training run from its events: attempts, incidents, marks and counts."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healcore.events.log import Event
from healcore.events.models import EventRecord, RerunVerdict, RollbackOutcome, record
from healcore.history.incident import MOST_ALARMS, Incident, batches_of
from healcore.history.process import KnownGood, RunProcess, RunState

_LATE = frozenset({"good", "damaged", "save_failed"})
"""Kinds whose `step` is the step of an older checkpoint."""
_OF_ONE_STEP = frozenset({"alarm", "incident", "order", "hook", "lr", "verdict"})
"""Kinds whose `step` is the index of a finished step; the others have the number of steps done."""


class AttemptOrigin(enum.StrEnum):
    """The beginning of an attempt."""

    START = "start"
    PROCESS = "process"
    RESUME = "resume"
    ROLLBACK = "rollback"
    TRIAL = "trial"
    METRICS = "metrics"
    """The attempt has metrics and no event."""
    RECORDED = "recorded"
    """Rows of a replayed log."""


class RunAttempt(NamedTuple):
    """The steps from a start, a resume or a rollback to the next."""

    number: int
    first_step: float
    origin: AttemptOrigin
    source: str = ""  # file of its rows, if there are several files


class Mark(NamedTuple):
    """A mark on the step axis besides incidents: a resume, a stop, the end."""

    step: float
    event: EventRecord | None = None  # None for the stop of a replay, which has no events

    @property
    def kind(self) -> str:
        """Kind of the event."""
        return "stop" if self.event is None else self.event.kind


@dataclass(eq=False, repr=False)
class Run:
    """A training run: its first process, and the processes that resumed from its checkpoints.

    Events are added in the order in which they are read.
    """

    processes: list[RunProcess] = field(default_factory=list)
    attempts: list[RunAttempt] = field(default_factory=list)
    attempt_ids: list[tuple[str, int]] = field(default_factory=list)  # process, number within it
    marks: list[Mark] = field(default_factory=list)
    points: list[tuple[int, EventRecord]] = field(default_factory=list)
    """Number of the attempt, and alarm with readings."""
    rollbacks: list[EventRecord] = field(default_factory=list)  # rollbacks without trials
    malformed: list[tuple[EventRecord, list[str]]] = field(default_factory=list)
    """Event, and names of its fields that were dropped because they have the wrong type."""
    problems: list[EventRecord] = field(default_factory=list)  # events that report a problem
    faults: list[EventRecord] = field(default_factory=list)  # classified exceptions
    step: int | None = None  # steps done
    last_step: int | None = None  # steps done at the last event; a rollback does not decrease it
    lr_scale: float | None = None  # current multiplier of the learning rate
    incidents: list[Incident] = field(default_factory=list)
    last_incident: Incident | None = None  # last incident with an own event or alarm
    rerun: RerunVerdict | None = None  # verdict of the last re-run of a step
    damaged: list[int] = field(default_factory=list)  # steps of damaged checkpoints
    incident_count: int = 0  # including incidents whose events were rotated away
    rollback_count: int = 0  # likewise; orders of rollbacks if the policy observes
    cuts: int = 0  # cuts of the learning rate
    stops: int = 0  # stops that an observing policy would order
    alarms: int = 0  # alarms with an event
    skips: int = 0  # alarms with a skipped step
    unreported_alarms: int = 0  # alarms without an event
    lost: int = 0  # events that could not be written

    def __post_init__(self) -> None:
        self._skipped: list[float] = []  # skipped steps that were not undone
        self._known_good = KnownGood()
        self._outside: Counter[str] = Counter()  # alarms outside of incidents, by process

    @property
    def undone_skips(self) -> int:
        """Skipped steps with an event that a rollback or a restart has undone."""
        return self.skips - len(self._skipped)

    @property
    def undone_incidents(self) -> int:
        """Incidents whose onset a rollback or a restart has undone."""
        return sum(each.undone for each in self.incidents)

    @property
    def start(self) -> EventRecord | None:
        """Newest event `start`."""
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
    def last_good(self) -> int | None:
        """Step of the newest known-good checkpoint."""
        return self._known_good.newest

    @property
    def observes(self) -> bool:
        """Whether the policy only observes."""
        start = self.start
        return start is not None and start.mode == "observe"

    @property
    def capped(self) -> bool:
        """Whether some alarms may have no event: `skips` is a lower bound then."""
        outside = max(self._outside.values(), default=0)
        return outside >= MOST_ALARMS or any(each.capped for each in self.incidents)

    def add(self, event: Mapping[str, Any]) -> EventRecord:
        """Adds an event from `log.parse`. Returns it without fields of the wrong type."""
        found, wrong = record(event)
        if wrong:
            self.malformed.append((found, wrong))
        if not self.processes or found.run != self.processes[-1].id:
            self._begin_process(found)
        self.processes[-1].add(found)
        self._known_good.add(found)
        if found.step is not None and found.kind not in _LATE:
            self.step = self.last_step = found.step + (found.kind in _OF_ONE_STEP)
        if found.lr_scale is not None:
            self.lr_scale = found.lr_scale
        if found.problem is not None and found.kind in ("problem", "save_failed", "damaged"):
            self.problems.append(found)
        if found.kind == "fault":
            self.faults.append(found)
        self.lost += found.lost or 0
        self.unreported_alarms += found.unreported_alarms or 0
        handler = _HANDLERS.get(found.kind)  # the kind may be anything
        if handler is not None:
            handler(self, found, float(found.step or 0))
        return found

    def _begin_process(self, event: EventRecord) -> None:
        origin = AttemptOrigin.PROCESS if self.attempts else AttemptOrigin.START
        self._attempt(event.run, 0, float(event.step or 0), origin)
        self.processes.append(RunProcess(event.run))
        self.step = self.last_step = self.lr_scale = None

    def _attempt(self, run: str, number: int, first: float, origin: AttemptOrigin) -> None:
        self.attempts.append(RunAttempt(len(self.attempts), first, origin))
        self.attempt_ids.append((run, number))

    def _undo(self, step: float) -> None:
        """Marks skips and incidents from `step` on as undone."""
        self._skipped = [each for each in self._skipped if each < step]
        for each in self.incidents:
            each.undone |= each.onset_step >= step

    def _add_resume(self, event: EventRecord, step: float) -> None:
        at = step if event.checkpoint is None else float(event.checkpoint)
        self._undo(at)
        self.attempts[-1] = self.attempts[-1]._replace(first_step=at, origin=AttemptOrigin.RESUME)
        self.marks.append(Mark(at, event))

    def _add_rollback(self, event: EventRecord, step: float) -> None:
        target = event.checkpoint
        trial = event.outcome == RollbackOutcome.TRIAL
        self.step = event.step if target is None else target
        if not trial:  # `number` includes rollbacks whose events were rotated away
            self.rollback_count = max(self.rollback_count + 1, event.number or 0)
        if target is None:
            return
        if not trial:
            self.rollbacks.append(event)
        onset = step if event.onset is None else float(event.onset)
        if not self.incidents or self.incidents[-1].onset_step != onset:
            self._open(event, onset)  # a hook ordered it, without an incident
        last = self.incidents[-1]
        last.measure(event, "ROLLBACK")
        if not trial:
            last.checkpoint = target
            last.skipped_batches = batches_of(event) or last.skipped_batches
            last.count_rollback()
            last.cut(event)
        self._undo(float(target))
        run, number = self.attempt_ids[-1]
        if event.outcome == RollbackOutcome.AFTER_CRASH:  # the process began with it
            self.attempts[-1] = self.attempts[-1]._replace(
                first_step=float(target), origin=AttemptOrigin.ROLLBACK
            )
            return
        origin = AttemptOrigin.TRIAL if trial else AttemptOrigin.ROLLBACK
        self._attempt(run, number + 1, float(target), origin)

    def _add_incident(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count + 1, event.incident or 0)
        self._open(event, step if event.onset is None else float(event.onset))
        self.last_incident = self.incidents[-1]

    def _add_alarm(self, event: EventRecord, step: float) -> None:
        self.alarms += 1
        if event.skip:
            self.skips += 1
            self._skipped.append(step)
        if event.step is not None and event.readings is not None:
            self.points.append((len(self.attempts) - 1, event))
        if event.incident:
            self._incident_of(event).add(event)
        else:
            self._outside[event.run] += 1
            self.marks.append(Mark(step, event))

    def _add_order(self, event: EventRecord, step: float) -> None:
        if event.observed:
            self.rollback_count += "ROLLBACK" in (event.action or ())
            self.stops += "STOP" in (event.action or ())
        if event.incident:
            self._incident_of(event).add(event)
        else:
            self.marks.append(Mark(step, event))

    def _add_hook(self, event: EventRecord, step: float) -> None:
        last = self.incidents[-1] if self.incidents else None
        if last is None or (last.attempt, last.step) != (len(self.attempts) - 1, step):
            self.marks.append(Mark(step, event))
            return
        ordered = event.ordered or ()
        last.action = tuple(name for name in last.action if name not in ordered)
        last.measure(event, *(event.action or ()))

    def _add_lr(self, event: EventRecord, step: float) -> None:
        before, after = event.lr_scale_before, event.lr_scale
        if before is None or after is None:
            return
        # A decrease that is not an order has a reason: the limit of an earlier cut.
        cut = after < before and (event.why is None or "CUT_LR" in (event.action or ()))
        self.cuts += cut
        if cut and self.incidents and self.incidents[-1].attempt == len(self.attempts) - 1:
            self.incidents[-1].cut(event)

    def _add_verdict(self, event: EventRecord, step: float) -> None:
        self.rerun = RerunVerdict(event.outcome) if event.outcome in set(RerunVerdict) else None
        if self.incidents:
            self.incidents[-1].measure(event)

    def _add_stop(self, event: EventRecord, step: float) -> None:
        self.marks.append(Mark(step, event))
        if self.incidents:
            last = self.incidents[-1]
            last.measure(event, "STOP")
            last.stop_step = step if last.stop_step is None else last.stop_step

    def _add_damaged(self, event: EventRecord, step: float) -> None:
        at = event.step if event.checkpoint is None else event.checkpoint
        if at is not None:
            self.damaged.append(at)

    def _add_end(self, event: EventRecord, step: float) -> None:
        self.incident_count = max(self.incident_count, event.incidents or 0)
        self.rollback_count = max(self.rollback_count, event.rollbacks or 0)
        self.marks.append(Mark(step, event))

    def _open(self, event: EventRecord, onset: float) -> None:
        self.incidents.append(
            Incident(
                number=event.incident or len(self.incidents) + 1,
                attempt=len(self.attempts) - 1,
                onset_step=onset,
                step=max(onset, float(event.step or 0)),
                cause=tuple(event.cause or ()),
                batches=() if event.kind == "rollback" else batches_of(event),
            )
        )

    def _incident_of(self, event: EventRecord) -> Incident:
        """The event's incident; its `incident` event may be lost to a torn line."""
        if not self.incidents or self.incidents[-1].number != event.incident:
            self._open(event, float(event.step or 0))
        self.last_incident = self.incidents[-1]
        return self.last_incident


def is_continuation(events: Iterable[Event]) -> bool:
    """Whether a process resumed from a checkpoint of the process before it, by its events.

    After a kill during a rollback the next start finishes the rollback, without an event `resume`.
    """
    for event in events:
        finished = event.get("outcome") == RollbackOutcome.AFTER_CRASH
        if event["kind"] == "resume" or finished or event.get("resumes") is True:
            return True
        if event["kind"] in ("save", "alarm", "incident"):
            return False
    return False


def runs_of(processes: Mapping[str, Sequence[Event]]) -> list[Run]:
    """Joins the processes of an events file (run id -> events) into training runs."""
    found: list[Run] = []
    for events in processes.values():
        if not found or not is_continuation(events):
            found.append(Run())
        for event in events:
            found[-1].add(event)
    return found


_HANDLERS = {
    "resume": Run._add_resume,
    "rollback": Run._add_rollback,
    "incident": Run._add_incident,
    "alarm": Run._add_alarm,
    "order": Run._add_order,
    "hook": Run._add_hook,
    "lr": Run._add_lr,
    "verdict": Run._add_verdict,
    "stop": Run._add_stop,
    "damaged": Run._add_damaged,
    "end": Run._add_end,
}
