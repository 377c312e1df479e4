"""`RunHistory`: what happened in a training run, from its events."""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from healcore.events.json_lines import Event
from healcore.events.log import TIME_FORMAT
from healcore.events.models import Ending, EventRecord, validate
from healcore.events.process import Process
from healcore.events.schema import KINDS, Trait, has
from healcore.history.counts import Counts, count_incidents
from healcore.history.incidents import Incident, batch_ids

_MAX_OUTSIDE = 1000
"""Limit of listed alarms outside of incidents."""
_MAX_NEWEST = 20
"""Limit of kept events of a kind: the newest ones."""
_COMPARED = ("earlier_weights", "intended_numbers")
"""`EventRecord.by` of a rollback that a comparison of weights has led to."""


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
    start: EventRecord | None = None
    """The event of the start, or None if it is lost, for example in a torn line."""
    end: EventRecord | None = None
    """The event of the end, or None for a process that was killed or still runs."""
    last: EventRecord | None = None
    """Its newest event of any kind, or None without an event. See also `add_row`."""
    diagnosis: str = ""
    """Newest diagnosis in the events, or empty after a rollback or the end of the incident."""
    resumed_at: int | None = None
    """Step of the checkpoint that the process has resumed, or None."""
    trained: bool = True
    """False for a start that has found the run completed, and only loaded its final state."""
    began: float | None = None
    """Monotonic clock of its first event, in seconds."""

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
        elif event.kind == "resume":
            self.resumed_at = event.checkpoint
        if event.kind in ("rollback", "over", "retried"):  # the alert before is answered
            self.diagnosis = ""
        if event.kind != "alarm":
            self.diagnosis = event.diagnosis or self.diagnosis
        if self.began is None:
            self.began = event.mono

    def add_row(self, time: float) -> None:
        """Takes a line of the metrics file for the newest record, if it is later than the events.

        A healthy process writes few events. If it was killed, its metrics show how long it ran.

        Args:
            time: time of the line, in seconds since 1970.
        """
        last = self.last
        if last is None or last.time is None or last.mono is None:
            return
        later = time - datetime.fromisoformat(last.time).timestamp()
        if later > 0:
            text = f"{datetime.fromtimestamp(time, UTC):{TIME_FORMAT}}"
            self.last = last.model_copy(update={"time": text, "mono": last.mono + later})

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
            The state by the event `end`. Without this event a killed process and a running process
            look the same in the file. Then the operating system knows whether the process exists.
            UNKNOWN if the process ran on another machine.
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
        if gone:
            return RunState.GONE
        return RunState.RUNNING


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
    (`runs_of`) and follows a live run (`RunLog`). The method `_on_<kind>` handles the events of a
    kind.
    """

    processes: list[RunProcess] = field(default_factory=list)
    """All processes, the first start first."""
    attempts: list[RunAttempt] = field(default_factory=list)
    """All attempts, oldest first."""
    incidents: list[Incident] = field(default_factory=list)
    """All incidents, oldest first."""
    rollbacks: list[EventRecord] = field(default_factory=list)
    """The events `rollback`, oldest first."""
    malformed: list[tuple[EventRecord, list[str]]] = field(default_factory=list)
    """Events with fields of the wrong type, and the names of these fields."""
    newest: dict[str, deque[EventRecord]] = field(
        default_factory=lambda: {kind: deque(maxlen=_MAX_NEWEST) for kind in KINDS}
    )
    """Kind -> its newest events."""
    answers: Counter[str] = field(default_factory=Counter)
    """Response to faults -> number of faults."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the program, the newest values."""
    step: int | None = None
    """Steps done."""
    lr_scale: float | None = None
    """Current multiplier of the learning rate."""
    last_incident: Incident | None = None
    """Last incident that has an event or an alarm."""
    alarms_outside: dict[float, tuple[str, ...]] = field(default_factory=dict)
    """Step -> causes, of the first alarms outside of incidents."""
    alarms_undone_by: dict[float, EventRecord] = field(default_factory=dict)
    """Step of such an alarm -> the rollback that has undone it, if it has not come again."""
    alerts: int = 0
    """Alerts outside of incidents, about which nothing was changed."""
    declined: int = 0
    """Orders that were declined."""
    incident_count: int = 0
    """Number of incidents, including incidents whose events were rotated away."""
    skips: int = 0
    """Skipped steps, including undone steps."""
    clips: int | None = None
    """Steps with clipped gradients, or None without a postmortem."""
    lost: int = 0
    """Events that could not be written."""
    losses_before: dict[int, float] = field(default_factory=dict)
    """Onset of accepted damage -> mean loss before it, where known."""

    def __post_init__(self) -> None:
        self._good_steps: set[int] = set()  # steps of the known-good checkpoints in the store
        self._saved_steps: set[int] = set()  # steps of the checkpoints, without abandoned ones
        self._store: str | None = None
        self._new_skips: list[float] = []  # skipped steps since the last rollback or restart
        # Onset of accepted damage -> first step of the checkpoints that know of it.
        self._unrepaired: dict[int, float] = {}
        # The same for damage for which no checkpoint could be restored.
        self._not_restored: dict[int, float] = {}
        self._undone_tries: set[int] = set()  # places in `rollbacks`

    @property
    def last_trained(self) -> RunProcess | None:
        """Last process that has trained, or None without a process.

        A program may start again after its run has completed, for an evaluation. That process says
        nothing about the run, so the facts of the end are those of the process before.
        """
        for process in reversed(self.processes):
            if process.trained:
                return process
        return None

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
        return max(self._good_steps, default=None)

    @property
    def last_saved(self) -> int | None:
        """Step of the newest checkpoint that no rollback and no restart has abandoned, or None."""
        return max(self._saved_steps, default=None)

    @property
    def unrepaired(self) -> tuple[int, ...]:
        """Onsets of the damage that the weights have.

        The damage has come back after each rollback, or no checkpoint could be restored.
        """
        return tuple(sorted({*self._unrepaired, *self._not_restored}))

    @property
    def undone_tries(self) -> int:
        """Number of rollbacks whose changes were undone, because they have not helped."""
        return len(self._undone_tries)

    @property
    def rollbacks_in_force(self) -> list[EventRecord]:
        """The rollbacks without those whose changes were undone, because they have not helped."""
        found: list[EventRecord] = []
        for place, event in enumerate(self.rollbacks):
            if place not in self._undone_tries:
                found.append(event)
        return found

    @property
    def steps_lost(self) -> int:
        """Steps that rollbacks have undone and that were not repeated."""
        return sum(rollback.steps_lost or 0 for rollback in self.rollbacks)

    @property
    def why_lost(self) -> str:
        """Why the newest lost steps were not repeated, or empty if no step is lost."""
        why = ""
        for rollback in self.rollbacks:
            if rollback.steps_lost:
                why = rollback.why or ""
        return why

    @property
    def observes(self) -> bool:
        """Whether the policy only observes."""
        start = self.start
        return start is not None and start.mode == "observe"

    def add(self, event: Mapping[str, Any]) -> EventRecord:
        """Adds an event.

        Args:
            event: the next event of the run, from `healcore.events.events_file.parse`.

        Returns:
            The event without fields of the wrong type.
        """
        record, invalid_fields = validate(event)
        kind = record.kind
        step = float(record.step or 0)
        if invalid_fields:
            self.malformed.append((record, invalid_fields))
        if not self.processes or record.run != self.processes[-1].id:
            self._begin_process(record.run, step)
        self.processes[-1].add(record)
        self._track_checkpoints(record)
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

    def _begin_process(self, process: str, step: float) -> None:
        """Adds a process, and the attempt that it begins."""
        origin = "start"
        if self.attempts:
            origin = "process"
        killed = bool(self.processes) and self.processes[-1].end is None
        self.attempts.append(RunAttempt(step, origin, self.step, killed=killed))
        self.processes.append(RunProcess(process))
        self.step = None
        self.lr_scale = None

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
        skips = written.get("observed_skips", written.get("skips"))
        if type(skips) is int:
            self.skips = max(self.skips, skips)
        clips = written.get("observed_clips", written.get("clips"))
        if type(clips) is int:
            self.clips = max(self.clips or 0, clips)
        onsets = written.get("unrepaired")
        if isinstance(onsets, list) and all(type(onset) is int for onset in onsets):
            self._unrepaired = dict.fromkeys(onsets, 0.0)
            self._not_restored.clear()

    def _track_checkpoints(self, event: EventRecord) -> None:
        """Updates the steps of the checkpoints, all and known-good. A rollback abandons some."""
        step = event.checkpoint
        if step is None:
            step = event.step
        if event.kind == "start" and event.store != self._store:
            self._store = event.store
            self._good_steps.clear()
            self._saved_steps.clear()
        elif event.kind == "save" and step is not None:
            self._saved_steps.add(step)
        elif event.kind == "save_failed" and step is not None:
            self._saved_steps.discard(step)
        elif event.kind == "good" and step is not None:
            self._good_steps.add(step)
        elif event.kind in ("rollback", "resume") and step is not None:
            self._good_steps = {good for good in self._good_steps if good <= step}
            self._saved_steps = {saved for saved in self._saved_steps if saved <= step}
        elif event.kind == "damaged" and step is not None and not event.other_copy:
            self._good_steps.discard(step)
        if event.last_good is not None:
            self._good_steps.add(event.last_good)

    def _undo(self, step: float, rollback: EventRecord | None = None) -> None:
        """Marks incidents and alarms from `step` on as undone, by a rollback or by a restart."""
        for incident in self.incidents:
            if incident.onset_step >= step and not incident.undone:
                incident.undone = True
                incident.undone_by = rollback
        if rollback is None:
            return
        for alarm in self.alarms_outside:
            if alarm >= step:
                self.alarms_undone_by.setdefault(alarm, rollback)

    def _undo_tries(self, onset: int) -> None:
        """Marks the rollbacks for the damage that begins at a step as undone."""
        for place, event in enumerate(self.rollbacks):
            if event.by in _COMPARED and onset <= (event.step or 0):
                self._undone_tries.add(place)

    def _lose(self, step: float) -> None:
        """Takes back the counts since the last rollback from `step` on: the restart counts again.

        The counts of the run are saved with its checkpoints, so the run itself counts them once.
        """
        for incident in self.incidents:
            if incident.attempt != len(self.attempts) - 2 or incident.onset_step < step:
                continue
            incident.lost = True
            if incident.number:
                self.incident_count = min(self.incident_count, incident.number - 1)
        self.skips -= sum(skipped >= step for skipped in self._new_skips)
        self._new_skips.clear()

    def _on_resume(self, event: EventRecord, step: float) -> None:
        first = step
        if event.checkpoint is not None:
            first = float(event.checkpoint)
        self._undo(first)
        self._lose(first)
        # The restart decides again about damage that its checkpoint does not know.
        for damage in (self._unrepaired, self._not_restored):
            for onset, known in [*damage.items()]:
                if known > first:
                    del damage[onset]
        self.attempts[-1] = self.attempts[-1]._replace(first_step=first, origin="resume")

    def _on_rollback(self, event: EventRecord, step: float) -> None:
        target = event.checkpoint
        if target is None:
            return
        self.step = target
        if event.by in _COMPARED and event.onset in self._unrepaired:
            self._undo_tries(event.onset)
        # The restored checkpoint knows of all damage that was accepted so far.
        for damage in (self._unrepaired, self._not_restored):
            for onset, known in damage.items():
                damage[onset] = min(known, target)
        for onset in [*self._not_restored]:
            if onset >= target:
                del self._not_restored[onset]
        self.rollbacks.append(event)
        self._new_skips.clear()
        onset = _onset(event, step)
        if not self.incidents or self.incidents[-1].onset_step != onset:
            self._open(event, onset)  # better weights or a hook: a rollback without an incident
        last = self.incidents[-1]
        last.add_response(event, "ROLLBACK")
        skipped = batch_ids(event)
        # A dict as an ordered set: two rollbacks of an incident may skip the same batch.
        last.skipped_batches = tuple(dict.fromkeys((*last.skipped_batches, *skipped)))
        last.add_cut(event)
        self._undo(float(target), event)
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
            self._new_skips.append(step)
        if event.incident:
            self._on_order(event, step)
        elif step in self.alarms_outside or len(self.alarms_outside) < _MAX_OUTSIDE:
            self.alarms_outside[step] = tuple(event.cause or ())
            self.alarms_undone_by.pop(step, None)  # it has come again in a repeat

    def _on_order(self, event: EventRecord, step: float) -> None:
        if not event.incident:
            return
        if not self.incidents or self.incidents[-1].number != event.incident:
            self._open(event, step)  # its event `incident` is lost
        self.last_incident = self.incidents[-1]
        self.last_incident.add(event)

    def _on_alert(self, event: EventRecord, step: float) -> None:
        if not event.incident:
            self.alerts += 1

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
        if event.verdict == "accepted" and event.onset is not None:
            damage = self._unrepaired
            if event.by == "nothing":
                damage = self._not_restored
            damage.setdefault(event.onset, step + 1)
            if event.loss_before is not None:
                self.losses_before[event.onset] = event.loss_before
        if event.verdict == "recovered" and event.onset is not None:
            for damage in (self._unrepaired, self._not_restored):
                damage.pop(event.onset, None)
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
        process = self.processes[-1]
        if len(self.processes) > 1 and event.ending is Ending.COMPLETED:
            before = self.processes[-2].end
            if before is not None and before.ending is Ending.COMPLETED:
                process.trained = process.resumed_at != event.step
        if not process.trained:
            self.attempts.pop()

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
        # The `batches` of a rollback are those that it has skipped.
        if event.kind != "rollback":
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
        begun another run.
    """
    for event in events:
        if event["kind"] == "resume" or event.get("resumes") is True:
            return True
        if event["kind"] in ("save", "alarm", "incident"):
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
        if not runs or not is_continuation(events):
            runs.append(RunHistory())
        for event in events:
            runs[-1].add(event)
    return runs
