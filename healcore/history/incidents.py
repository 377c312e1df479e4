"""`Incident`: alarms of a run with one onset, and what was done about them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from healcore.events.models import EventRecord, EvidenceRecord, ReadingsRecord

MAX_ALARMS = 100
"""Limit of alarms with an event: per incident, and in total outside of incidents."""


QUIET_STEPS = 10
"""Rows without an alarm that end an incident, as in the policy `default`."""


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
    incident, and spends one attempt of the budget. Its events are added in file order. A rollback
    for which no detector raised an alarm has an incident too, with number 0.
    """

    number: int
    """Number from 1, over the whole run; 0 for a rollback without an incident."""
    attempt: int
    """Number of the attempt in which it began, from 0."""
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
    declined: bool = False
    """Whether the last order was declined for lack of evidence or budget."""
    responses: tuple[EventRecord, ...] = ()
    """Events of what was done: rollbacks, hooks, declined orders, a stop."""
    lr_path: tuple[float, ...] = ()
    """Learning-rate multipliers: the first, and after each cut."""
    batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches of the first step."""
    rows: Sequence[list[int]] = ()
    """For each of `batches` its first rows of the dataset, if known."""
    skipped_batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches that a rollback has skipped."""
    evidence: tuple[EvidenceRecord, ...] = ()
    """Tensors with unusual gradients, the worst first."""
    readings: ReadingsRecord | None = None
    """Readings of the first alarm."""
    diagnosis: str = ""
    """Explanation of the first alarm that has its own, or empty."""
    last_step: float | None = None
    """Step of the last alarm, or None if equal to `step`."""
    over: bool = False
    """Whether the incident has an event `over`."""
    undone: bool = False
    """Whether the run went back to a step before the onset, by a rollback or a restart."""
    undone_by: EventRecord | None = None
    """The rollback that has undone the incident, or None if none has, or a restart has."""
    lost: bool = False
    """Whether its process was lost before a save. A restart repeats its steps, and counts again."""

    @property
    def capped(self) -> bool:
        """Whether some alarms may have no event, so that `skipped` is a lower bound."""
        return self.alarms >= MAX_ALARMS

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

        Causes and actions accumulate. Batches, readings, evidence and diagnosis are taken from the
        first event that has them, because later alarms are mostly consequences of the first alarm.

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
    """Joins names without duplicates.

    Args:
        names: the names so far, in order.
        added: further names, which may repeat earlier names.

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
