"""`RunHistory`: what happened in a training run, as its list of events with folds over it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from healcore.events.kinds import Trait, has
from healcore.events.log import Event
from healcore.events.models import Ending, EventRecord, validate
from healcore.events.process import Process

MAX_ALARMS = 100
"""Limit of alarms with an event: per incident, and in total outside of incidents."""
QUIET_STEPS = 10
"""Rows without an alarm that end an incident, as in the policy `default`."""
_MAX_EVENTS = 10_000
"""Limit of the kept events of a run, of about 6 kB each: the newest ones."""


class Mode(enum.StrEnum):
    """Whether the orders of the policy were carried out.

    Reports depend on it: "3 steps were skipped" in mode HEAL is "would have been skipped" in the
    other modes.
    """

    HEAL = "heal"
    """All orders were carried out."""
    OBSERVE = "observe"
    """No order was carried out during the run."""
    REPLAY = "replay"
    """The orders are from a later replay of recorded rows."""


class Counts(NamedTuple):
    """Counts of a run or a replay, for reports and the postmortem.

    None means unknown, which is not 0: clips, for example, are not events, so only the postmortem
    and the metrics of a run have their number.
    """

    incidents: int = 0
    """Incidents, including incidents whose steps a rollback has undone."""
    rollbacks: int = 0
    """Rollbacks that were carried out; without healing, incidents that would be rolled back."""
    skips: int = 0
    """Skipped steps, including steps that a rollback has undone."""
    clips: int | None = None
    """Steps with clipped gradients, or None if unknown."""
    alarms: int | None = None
    """Steps with a cause, or None if unknown."""
    lr_cuts: int = 0
    """Cuts of the learning rate, which only a live run counts."""


def changes_made(counts: Mapping[str, Any], *, observes: bool) -> dict[str, Any]:
    """The counts of changes of a run, whose policy may only have observed.

    Args:
        counts: name of a change, such as `skips` -> its number, or None if unknown.
        observes: whether the policy only observes, so that nothing was changed.

    Returns:
        The counts. With `observes`, "skips" is 0, and "observed_skips" is the number of skips that
        the policy would have made.
    """
    if not observes:
        return {**counts}
    return dict.fromkeys(counts, 0) | {f"observed_{name}": counts[name] for name in counts}


def alarm_spans(alarm: np.ndarray, quiet_steps: int = QUIET_STEPS) -> list[tuple[int, int]]:
    """Groups alarms that follow one another closely.

    A replay and the loss probe name the onsets of the same spans.

    Args:
        alarm: whether a row has an alarm, bool (n,).
        quiet_steps: number of rows without an alarm that separates two spans.

    Returns:
        The first row of each span, which is its onset, and the last row with an alarm.
    """
    rows = np.flatnonzero(alarm)
    spans = np.split(rows, 1 + np.flatnonzero(np.diff(rows) > quiet_steps))
    return [(int(span[0]), int(span[-1])) for span in spans if len(span)]


# -- incidents ------------------------------------------------------------------------------------


@dataclass
class Incident:
    """Alarms with one onset, and what was done about them.

    An incident is a sequence of close alarms: it begins at the first alarm, its onset, and is over
    after `incident.quiet_steps` steps without an alarm. One fault that lasts 50 steps is one
    incident, and spends one attempt of the budget. A rollback for which no detector raised an alarm
    has an incident too, with number 0.
    """

    number: int
    """Number from 1, over the whole run; 0 for a rollback without an incident."""
    onset_step: float
    """Step of the first alarm."""
    step: float
    """Step of the last alarm or order. In a replay the step of the first order, if any."""
    cause: tuple[str, ...] = ()
    """Names of the causes of all alarms."""
    action: tuple[str, ...] = ()
    """Orders to the host, which are carried out only in mode HEAL."""
    mode: Mode = Mode.HEAL
    """Whether the policy healed, observed, or was replayed."""
    first: EventRecord = field(default_factory=EventRecord)
    """The first alarm: later alarms are mostly consequences of it. Without fields if unknown."""
    alarms: int = 0
    """Alarms with an event. From `MAX_ALARMS` on, `skipped` is a lower bound."""
    skipped: int = 0
    """Skipped steps."""
    clipped: int | None = None
    """Steps with clipped gradients, or None if not counted."""
    responses: list[EventRecord] = field(default_factory=list)
    """Events of what was done: rollbacks, hooks, declined orders, a stop."""
    lr_path: tuple[float, ...] = ()
    """Learning-rate multipliers: the first, and after each cut."""
    last_step: float | None = None
    """Step of the last alarm, or None if equal to `step`."""

    @property
    def skipped_batches(self) -> tuple[tuple[int, ...], ...]:
        """(epoch, index) of the batches that rollbacks have skipped."""
        skipped: dict[tuple[int, ...], None] = {}  # two rollbacks may skip the same batch
        for event in self.responses:
            skipped |= dict.fromkeys(map(tuple, event.batches or ()))
        return tuple(skipped)

    @property
    def last_kind(self) -> str:
        """Kind of the last response, or empty."""
        if not self.responses:
            return ""
        return self.responses[-1].kind

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
        """Adds an alarm of the incident, or an event of the response to it.

        Args:
            event: an alarm, or a rollback, a stop, a declined order, or a hook.
        """
        if event.kind == "alarm":
            self.step = max(self.step, event.step or 0)
            if event.observed:
                self.mode = Mode.OBSERVE
            self.cause = tuple(dict.fromkeys((*self.cause, *(event.cause or ()))))
            self.alarms += 1
            self.skipped += bool(event.skip)
            self.action = tuple(dict.fromkeys((*self.action, *(event.action or ()))))
        else:
            self.responses.append(event)
        before, after = event.lr_scale_before, event.lr_scale
        if before is not None and after is not None:
            path = self.lr_path or (before,)
            if after != path[-1]:
                self.lr_path = (*path, after)


def incidents_of(events: Iterable[EventRecord]) -> list[Incident]:
    """Folds the events of a run into its incidents.

    Args:
        events: the events in their order, as `RunHistory.events`.

    Returns:
        The incidents, oldest first.
    """
    found: list[Incident] = []
    current: Incident | None = None  # the last incident, or None after a rollback or a restart
    for event in events:
        step = event.step or 0
        match event.kind:
            case "alarm" if event.incident:
                if current is None or current.number != event.incident:
                    current = Incident(event.incident, step, step, first=event)
                    found.append(current)
                current.add(event)
            case "rollback":
                onset = event.onset
                if onset is None:
                    onset = step
                if not found or found[-1].onset_step != onset:
                    # Better weights or a hook: a rollback without an incident.
                    found.append(Incident(0, onset, max(onset, step), tuple(event.cause or ())))
                found[-1].add(event)
                current = None
            case "start" | "resume":
                current = None
            case "assessment" | "hook" if current is not None:
                # A policy may order the same at each step, and is answered the same.
                if event.verdict in (None, "unknown") and current.last_kind != event.kind:
                    current.add(event)
            case "stop" if found:
                found[-1].add(event)
    return found


# -- the run --------------------------------------------------------------------------------------


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
        first, last = self.first.mono, self.last.mono
        if first is None or last is None:
            return None
        return last - first

    def state(self) -> Ending:
        """Finds out how the process ended, or whether it is still running.

        Returns:
            The state by the event `end`. Without this event a killed process and a running process
            look the same in the file. Then the operating system knows whether the process exists.
            UNKNOWN if the process ran on another machine.
        """
        if self.end is not None:
            # Without a value it is an ending of a newer healcore.
            return self.end.ending or Ending.ENDED
        start, gone = self.start, None
        if start is not None and start.host is not None and start.pid is not None:
            gone = Process(start.host, start.pid, start.boot, start.born).gone()
        return {None: Ending.UNKNOWN, True: Ending.GONE, False: Ending.RUNNING}[gone]


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
    saved: list[int] = field(default_factory=list)
    """Steps of the checkpoints in the store of the last process, without abandoned ones."""
    good: list[int] = field(default_factory=list)
    """Steps that were known-good checkpoints of this store, without abandoned ones."""
    step: int | None = None
    """Steps done."""
    lost: int = 0
    """Events that could not be written."""

    def add(self, fields: Mapping[str, Any]) -> EventRecord:
        """Adds an event.

        Args:
            fields: the next event of the run, from `healcore.events.read`.

        Returns:
            The event without fields of the wrong type.
        """
        event, invalid = validate(fields)
        if invalid:
            self.malformed.append((event, invalid))
        done = event.step or 0
        if not self.processes or event.run != self.processes[-1].id:
            origin = "start"
            if self.attempts:
                origin = "process"
            killed = bool(self.processes) and self.processes[-1].end is None
            self.attempts.append(RunAttempt(done, origin, self.step, killed=killed))
            self.processes.append(RunProcess(event.run, event, event))
            self.step = None
        process = self.processes[-1]
        process.last = event
        self.lost += event.lost or 0
        if event.step is not None and not has(event.kind, Trait.CHECKPOINT):
            # A judged event has the step's index: one more step is done.
            self.step = done + has(event.kind, Trait.JUDGED)
        step = event.checkpoint
        if step is None:
            step = done
        match event.kind:
            case "start":
                if self.start is not None and self.start.store != event.store:
                    self.saved.clear()
                    self.good.clear()
                process.start = event
            case "save":  # a healthy run writes this and the next again and again
                self.saved.append(step)
                return event
            case "good":
                self.good.append(step)
                return event
            case "save_failed" if step in self.saved:
                self.saved.remove(step)
            case "resume":
                self._forget_from(step)
                self.attempts[-1] = self.attempts[-1]._replace(first_step=step, origin="resume")
            case "rollback":
                if event.checkpoint is None:
                    return event  # damaged
                skipped = len(event.batches or ())
                self.attempts.append(RunAttempt(step, "rollback", done, skipped))
                self.step = step
            case "end":
                process.end = event
        if event.kind in ("rollback", "resume"):  # later checkpoints are abandoned
            self.saved = [each for each in self.saved if each <= step]
            self.good = [each for each in self.good if each <= step]
        self.events.append(event)
        return event

    def _forget_from(self, step: int) -> None:
        """Forgets the judged steps from `step` on since the last rollback: a restart repeats them.

        The restart decides again about damage that its checkpoint does not know. A checkpoint to
        which the run was rolled back knows of all that happened until then.
        """
        kept: list[EventRecord] = []
        while self.events and self.events[-1].kind not in ("rollback", "resume"):
            event = self.events.pop()
            if not has(event.kind, Trait.JUDGED) or (event.step or 0) < step:
                kept.append(event)
        self.events.extend(reversed(kept))

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
        if not self.processes:
            return None
        return self.processes[-1].end

    @property
    def state(self) -> Ending:
        """Whether the run is running, or how it ended."""
        if not self.processes:
            return Ending.UNKNOWN
        return self.processes[-1].state()

    @property
    def observes(self) -> bool:
        """Whether the policy only observes."""
        return self.start is not None and self.start.mode == "observe"

    @property
    def incidents(self) -> list[Incident]:
        """All incidents, oldest first."""
        return incidents_of(self.events)

    @property
    def unrepaired(self) -> tuple[int, ...]:
        """Onsets of the damage that the weights have.

        The damage has come back after each rollback, or no checkpoint could be restored.
        """
        verdicts: dict[int, str] = {}
        for event in self.of("assessment"):
            if event.verdict in ("accepted", "recovered") and event.onset is not None:
                verdicts[event.onset] = event.verdict
        return tuple(sorted(each for each in verdicts if verdicts[each] == "accepted"))

    def counts(self) -> Counts:
        """Counts incidents, rollbacks and skips so far.

        Returns:
            The counts. Each may be too low, because not every alarm has an event; the postmortem
            has the exact numbers.
        """
        # The events of older incidents may have been rotated away.
        numbers = [event.incidents or event.incident or 0 for event in self.events]
        # One incident may have several rollbacks; a policy that observes has only incidents.
        ordered = sum(incident.rolled_back for incident in self.incidents)
        return Counts(
            incidents=max(numbers, default=0),
            rollbacks=len(self.of("rollback")) or ordered,
            skips=sum(bool(event.skip) for event in self.events),
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
