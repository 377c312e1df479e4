"""Defines an incident of a run (cause, response and outcome), and counts over incidents."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from healcore.events.models import EventRecord, EvidenceRecord, ReadingsRecord

MOST_ALARMS = 100  # limit of alarms with an event: per incident, and in total outside of incidents


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
    checkpoint: int | None = None  # step of the restored checkpoint
    batches: tuple[tuple[int, int], ...] = ()  # (epoch, index) of the batches of the first step
    rows: Sequence[list[int]] = ()  # for each of `batches` its first rows of the dataset, if known
    skipped_batches: tuple[tuple[int, int], ...] = ()  # (epoch, index), skipped by a rollback
    evidence: tuple[EvidenceRecord, ...] = ()  # tensors with unusual gradients, the worst first
    readings: ReadingsRecord | None = None  # readings of the first alarm
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
    """Returns the union of the names, in order of first occurrence."""
    return tuple(dict.fromkeys((*names, *added)))


def batch_ids(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """Returns (epoch, index) of each batch in `event.batches`."""
    return tuple((epoch, index) for epoch, index in event.batches or ())


class Counts(NamedTuple):
    """Counts of a run or a replay."""

    incidents: int = 0
    rollbacks: int = 0  # incidents with a rollback, and rollbacks without an incident
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
