"""`Incident`: alarms of a run with one onset, and what was done about them; and their counts."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from healcore.events.models import EventRecord, EvidenceRecord, ReadingsRecord

MAX_ALARMS = 100
"""Limit of alarms with an event: per incident, and in total outside of incidents."""


QUIET_STEPS = 10
"""Rows without an alarm that end an incident, as in the policy `default`."""

_Count = TypeVar("_Count", int, int | None)


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
    spans: list[tuple[int, int]] = []
    for span in np.split(rows, 1 + np.flatnonzero(np.diff(rows) > quiet_steps)):
        if len(span):
            spans.append((int(span[0]), int(span[-1])))
    return spans


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
    """Step of the order, or of the last alarm."""
    cause: tuple[str, ...] = ()
    """Names of the causes of all alarms."""
    action: tuple[str, ...] = ()
    """Orders to the host, which are carried out only in mode HEAL."""
    mode: Mode = Mode.HEAL
    """Whether the policy healed, observed, or was replayed."""
    alarms: int = 0
    """Alarms with an event."""
    skipped: int = 0
    """Skipped steps."""
    clipped: int | None = None
    """Steps with clipped gradients, or None if not counted."""
    responses: list[EventRecord] = field(default_factory=list)
    """Events of what was done: rollbacks, hooks, declined orders, a stop."""
    lr_path: tuple[float, ...] = ()
    """Learning-rate multipliers: the first, and after each cut."""
    batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches of the first step."""
    rows: Sequence[list[int]] = ()
    """For each of `batches` its first rows of the dataset, if known."""
    skipped_batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches that a rollback has skipped."""
    evidence: Sequence[EvidenceRecord] = ()
    """Tensors with unusual gradients, the worst first."""
    readings: ReadingsRecord | None = None
    """Readings of the first alarm."""
    last_step: float | None = None
    """Step of the last alarm, or None if equal to `step`."""
    over: bool = False
    """Whether the incident has an event `over`."""
    undone_by: EventRecord | None = None
    """The rollback that has undone the incident, or None if none has."""

    @property
    def capped(self) -> bool:
        """Whether some alarms may have no event, so that `skipped` is a lower bound."""
        return self.alarms >= MAX_ALARMS

    @property
    def declined(self) -> bool:
        """Whether the last order was declined for lack of evidence or budget."""
        return bool(self.responses) and self.responses[-1].kind == "assessment"

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

    def add(self, alarm: EventRecord) -> None:
        """Adds an alarm of the incident.

        Causes and actions accumulate. Batches, readings and evidence are of the first alarm that
        has them, because later alarms are mostly consequences of it.
        """
        self.step = max(self.step, float(alarm.step or 0))
        self.mode = Mode.OBSERVE if alarm.observed else self.mode
        self.cause = tuple(dict.fromkeys((*self.cause, *(alarm.cause or ()))))
        self.batches = self.batches or _batch_ids(alarm)
        self.rows = self.rows or alarm.rows or ()
        self.alarms += 1
        self.skipped += bool(alarm.skip)
        self.readings = self.readings or alarm.readings
        self.evidence = self.evidence or alarm.evidence or ()
        self._act(alarm, alarm.action or ())

    def respond(self, event: EventRecord, actions: Sequence[str] = ()) -> None:
        """Adds an event of the response: a rollback, a stop, a declined order, or a hook.

        Args:
            event: the event.
            actions: names of its actions, such as "ROLLBACK".
        """
        self.responses.append(event)
        self._act(event, actions)

    def _act(self, event: EventRecord, actions: Sequence[str]) -> None:
        """Adds actions, and the multiplier of the learning rate if the event has changed it."""
        self.action = tuple(dict.fromkeys((*self.action, *actions)))
        before, after = event.lr_scale_before, event.lr_scale
        if before is not None and after is not None:
            self.lr_path = self.lr_path or (before,)
            if after != self.lr_path[-1]:
                self.lr_path = (*self.lr_path, after)


def _batch_ids(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """The (epoch, index) of each batch of an event."""
    return tuple((epoch, index) for epoch, index in event.batches or ())


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
        step = float(event.step or 0)
        match event.kind:
            case "alarm" if event.incident:
                if current is None or current.number != event.incident:
                    current = Incident(event.incident, step, step)
                    found.append(current)
                current.add(event)
            case "over":
                for incident in found:
                    incident.over |= incident.number == event.incident
            case "rollback":
                _roll_back(found, event)
                current = None
            case "start" | "resume":
                current = None
            case "assessment" if current is not None and event.verdict == "unknown":
                if not current.declined:  # a policy may order the same at each step
                    current.respond(event)
            case "hook" if current is not None and current.step == step:
                overridden = event.ordered or ()
                current.action = tuple(each for each in current.action if each not in overridden)
                current.respond(event, event.action or ())
            case "stop" if found:
                found[-1].respond(event, ["STOP"])
    return found


def _roll_back(found: list[Incident], event: EventRecord) -> None:
    """Adds a rollback to its incident, and marks the incidents that it has undone."""
    step = event.step or 0
    onset = step if event.onset is None else event.onset
    if not found or found[-1].onset_step != onset:
        # Better weights or a hook: a rollback without an incident.
        found.append(Incident(0, onset, max(onset, step), tuple(event.cause or ())))
    last = found[-1]
    last.respond(event, ["ROLLBACK"])
    # A dict as an ordered set: two rollbacks of an incident may skip the same batch.
    last.skipped_batches = tuple(dict.fromkeys((*last.skipped_batches, *_batch_ids(event))))
    for incident in found:
        if incident.onset_step >= (event.checkpoint or 0) and incident.undone_by is None:
            incident.undone_by = event


# -- counts ---------------------------------------------------------------------------------------


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
    dropped: int = 0
    """Steps that a loss scale has left out, which only a live run counts."""


def name_changes(*, observes: bool, **counts: _Count) -> dict[str, _Count | int]:
    """Renames counts of changes, if a policy that only observes has not made these changes.

    Args:
        observes: whether the policy only observes, so that nothing was changed.
        **counts: name of a change, such as `skips` -> its number, or None if unknown.

    Returns:
        Name -> number. With `observes`, "skips" is 0, and "observed_skips" is the number of skips
        that the policy would have made.
    """
    if not observes:
        return {**counts}
    named: dict[str, _Count | int] = dict.fromkeys(counts, 0)
    for name, number in counts.items():
        named[f"observed_{name}"] = number
    return named
