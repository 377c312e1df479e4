"""Defines an incident of a run (cause, response and outcome), and counts over incidents."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.events.models import EventRecord, ReadingsRecord

MOST_ALARMS = 100  # alarms with an event: in each incident, and outside of incidents in total


class Mode(enum.StrEnum):
    """Whether actions were carried out, or only recorded as what a policy would do."""

    HEAL = "heal"
    OBSERVE = "observe"
    REPLAY = "replay"
    """A replay of recorded rows: no checkpoint could be restored."""


class IncidentOutcome(enum.StrEnum):
    """The outcome of an incident."""

    STOP = "stop"
    ROLLBACK = "rollback"
    """Also if the incident later stopped the run."""
    SKIP = "skip"
    ALERT = "alert"


@dataclass
class Incident:
    """Alarms with one onset. Events are added in the order in which they are read."""

    number: int  # from 1, over the whole run
    attempt: int
    onset_step: float
    step: float  # step of the order, or of the last alarm
    cause: tuple[str, ...] = ()
    action: tuple[str, ...] = ()  # orders to the host; unless HEAL, what the policy would order
    mode: Mode = Mode.HEAL
    alarms: int = 0  # alarms with an event
    skipped: int = 0  # skipped steps
    capped: bool = False  # some alarms may have no event: `skipped` is a lower bound
    clipped: int | None = None  # steps with clipped gradients, or None if not counted
    rollbacks: int = 0  # unless HEAL, orders of rollbacks; not counted in a replay
    repeats: int = 0  # rollbacks after the first
    denied: bool = False  # no budget for the first rollback: the run would stop
    repeat_denied: bool = False  # no budget for one of the repeats
    measures: tuple[EventRecord, ...] = ()  # rollbacks, hook answers, re-run verdicts, the stop
    lr_path: tuple[float, ...] = ()  # learning-rate multipliers, before the incident and after
    checkpoint: int | None = None  # step of the restored checkpoint
    batches: tuple[tuple[int, int], ...] = ()  # (epoch, index) of its first step
    skipped_batches: tuple[tuple[int, int], ...] = ()  # (epoch, index) skipped by a rollback
    evidence: tuple[Evidence, ...] = ()  # tensors with unusual gradients, the worst first
    readings: ReadingsRecord | None = None  # readings of its first alarm
    onset: int = -1  # row index of its first alarm, or -1 if unknown
    index: int = -1  # row index of `step`, or -1 if unknown
    stop: int = -1  # row index of the ordered stop, or -1 if unknown
    stop_step: float | None = None  # step of the ordered stop, or None
    last: int = -1  # row index of its last alarm, or -1 if that is `index`
    last_step: float | None = None  # step of its last alarm, or None if that is `step`
    undone: bool = False  # the run rolled back to before the onset

    @property
    def rolled_back(self) -> bool:
        """Whether a rollback was carried out, or would have been in an observing run or a replay.

        A run that heals may decline an order; `action` names the declined order too.
        """
        if self.mode is Mode.HEAL:
            return self.rollbacks > 0
        return "ROLLBACK" in self.action

    @property
    def outcome(self) -> IncidentOutcome:
        """The most severe action; a rollback ranks above a later stop."""
        if self.rolled_back:
            return IncidentOutcome.ROLLBACK
        if "STOP" in self.action:
            return IncidentOutcome.STOP
        return IncidentOutcome.SKIP if self.skipped else IncidentOutcome.ALERT

    @property
    def end(self) -> tuple[float, int]:
        """Step and row index of its last alarm or order."""
        if self.last_step is None:
            return self.step, self.index
        return self.last_step, self.last

    def add(self, event: EventRecord) -> None:
        """Adds one of its alarms or orders."""
        action = event.action or ()
        self.step = max(self.step, float(event.step or 0))
        if event.observed:
            self.mode = Mode.OBSERVE
        self.cause = with_names(self.cause, event.cause or ())
        self.action = with_names(self.action, action)
        self.batches = self.batches or batches_of(event)
        if event.kind == "alarm":
            self.alarms += 1
            self.capped = self.alarms >= MOST_ALARMS
            self.skipped += bool(event.skip)
            self.readings = self.readings or event.readings
            found = event.evidence or ()
            self.evidence = self.evidence or tuple(
                Evidence(each.name, each.grad_norm) for each in found
            )
            return
        if self.mode is Mode.OBSERVE and "ROLLBACK" in action:
            self.count_rollback()
        if "STOP" in action and self.stop_step is None:
            self.stop_step = float(event.step or 0)

    def count_rollback(self) -> None:
        """Counts a rollback that was carried out, or that an observing policy would order."""
        self.repeats += self.rollbacks > 0
        self.rollbacks += 1

    def measure(self, event: EventRecord, *ordered: str) -> None:
        """Adds an event about the response, and the actions that it implies."""
        self.measures = (*self.measures, event)
        self.action = with_names(self.action, ordered)

    def cut(self, event: EventRecord) -> None:
        """Adds a cut of the learning rate, which one event or two may report."""
        before, after = event.lr_scale_before, event.lr_scale
        if before is None or after is None:
            return
        path = self.lr_path or (before,)
        self.lr_path = path if after == path[-1] else (*path, after)


def with_names(names: Sequence[str], more: Sequence[str]) -> tuple[str, ...]:
    """Union of the names, in order."""
    return tuple(dict.fromkeys((*names, *more)))


def batches_of(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """(epoch, index) of the batches that an event names."""
    return tuple((epoch, index) for epoch, index in event.batches or ())


class Counts(NamedTuple):
    """Counts of one run, or of one replay."""

    incidents: int = 0
    rollbacks: int = 0  # incidents with a rollback
    repeats: int = 0  # rollbacks beyond one per incident
    denied: int = 0  # rollbacks beyond the budget
    stops: int = 0
    skips: int = 0  # skipped steps, including undone steps
    undone_incidents: int = 0  # incidents in steps that a rollback or a restart has undone
    undone_skips: int = 0  # skipped steps that a rollback or a restart has undone
    clips: int | None = None  # steps with clipped gradients, or None if unknown
    alarms: int | None = None  # steps with a cause, or None if unknown


def counts_of(incidents: Sequence[Incident], **more: int | None) -> Counts:
    """Counts incidents. `more` sets fields that incidents do not have, or corrects counts."""
    return Counts(
        incidents=len(incidents),
        rollbacks=sum(each.rolled_back for each in incidents),
        repeats=sum(each.repeats for each in incidents),
        stops=sum("STOP" in each.action for each in incidents),
        skips=sum(each.skipped for each in incidents),
        undone_incidents=sum(each.undone for each in incidents),
    )._replace(**more)
