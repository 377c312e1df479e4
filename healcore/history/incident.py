"""One incident of a run: cause, response and outcome; and counts over incidents."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.runtime.events.models import EventRecord

MOST_ALARMS = 100  # alarms with an event: in each incident, and outside of incidents in total

_MAX_EVIDENCE = 5  # tensors per incident


class Mode(enum.StrEnum):
    """Whether the listed actions were carried out, or are what a policy would have done."""

    HEAL = "heal"
    OBSERVE = "observe"
    REPLAY = "replay"
    """From recorded rows: no checkpoint could be restored."""


class IncidentOutcome(enum.StrEnum):
    """The outcome of an incident."""

    STOP = "stop"
    ROLLBACK = "rollback"
    """Also if the same incident ended in a stop later."""
    SKIP = "skip"
    ALERT = "alert"


class Incident(NamedTuple):
    """Alarms with one onset."""

    number: int  # from 1, over the whole run
    attempt: int
    onset_step: float
    step: float  # of the order, or of the last alarm
    cause: tuple[str, ...] = ()
    action: tuple[str, ...] = ()  # ordered on the host; unless HEAL, what would have been
    mode: Mode = Mode.HEAL
    skipped: int = 0  # skipped steps
    capped: bool = False  # some alarms may have no event: `skipped` is a lower bound
    clipped: int | None = None  # steps with clipped gradients; None: not counted
    repeats: int = 0  # rollbacks after the first; unless HEAL, those if the first did not help
    denied: bool = False  # the budget did not grant the first rollback: the run would stop
    repeat_denied: bool = False  # the budget did not grant one of the repeats
    measures: tuple[EventRecord, ...] = ()  # rollbacks, hook answers, re-run verdicts, the stop
    lr_path: tuple[float, ...] = ()  # learning-rate multipliers, from the one before it on
    checkpoint: int | None = None  # step of the restored checkpoint
    batches: tuple[tuple[int, int], ...] = ()  # (epoch, index) of those left out, or of the first
    left_out: bool = False  # `batches` were left out
    evidence: tuple[Evidence, ...] = ()  # tensors with unusual gradients, the worst first
    onset: int = -1  # row index of its first alarm; -1: not known
    index: int = -1  # row index of `step`; -1: not known
    stop: int = -1  # row index of the ordered stop; -1: not known
    stop_step: float | None = None  # step of the ordered stop; None: none, or not known
    last: int = -1  # row index of its last alarm; -1: it is `index`
    last_step: float | None = None  # step of its last alarm; None: it is `step`
    undone: bool = False  # the run went back to before its onset later

    @property
    def outcome(self) -> IncidentOutcome:
        """The most severe action; a rollback counts more than a stop after it."""
        if "ROLLBACK" in self.action:
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

    @property
    def lr_before(self) -> float | None:
        """Multiplier of the learning rate before it; None: not changed."""
        return self.lr_path[0] if self.lr_path else None

    @property
    def lr_after(self) -> float | None:
        """Multiplier of the learning rate after it; None: not changed."""
        return self.lr_path[-1] if self.lr_path else None


@dataclass
class OpenIncident:
    """An incident while its events are read."""

    number: int
    attempt: int
    onset_step: float
    step: float
    cause: list[str] = field(default_factory=list)
    action: list[str] = field(default_factory=list)
    measures: list[EventRecord] = field(default_factory=list)
    lr_path: list[float] = field(default_factory=list)
    batches: tuple[tuple[int, int], ...] = ()
    left_out: bool = False
    evidence: tuple[Evidence, ...] = ()
    observed: bool = False
    checkpoint: int | None = None
    rollbacks: int = 0
    skipped: int = 0
    alarms: int = 0
    stop_step: float | None = None
    undone: bool = False

    def add(self, event: EventRecord) -> None:
        """Adds one of its alarms or orders."""
        self.step = max(self.step, float(event.step or 0))
        self.observed |= bool(event.observed)
        add_names(self.cause, event.cause or ())
        add_names(self.action, event.action or ())
        if event.kind == "alarm":
            self.alarms += 1
            self.skipped += bool(event.skip)
            if not self.evidence:
                found = (event.evidence or ())[:_MAX_EVIDENCE]
                self.evidence = tuple(Evidence(each.name, each.grad_norm) for each in found)
            return
        ordered = event.action or ()
        self.rollbacks += self.observed and "ROLLBACK" in ordered
        if "STOP" in ordered and self.stop_step is None:
            self.stop_step = float(event.step or 0)

    def cut(self, before: float | None, after: float | None) -> None:
        """Adds a cut of the learning rate, which one event or two may report."""
        if before is None or after is None:
            return
        if not self.lr_path:
            self.lr_path = [before]
        if after != self.lr_path[-1]:
            self.lr_path.append(after)

    def snapshot(self) -> Incident:
        """The incident so far, without the indices of its rows."""
        return Incident(
            number=self.number,
            attempt=self.attempt,
            onset_step=self.onset_step,
            step=self.step,
            cause=tuple(self.cause),
            action=tuple(self.action),
            mode=Mode.OBSERVE if self.observed else Mode.HEAL,
            skipped=self.skipped,
            capped=self.alarms >= MOST_ALARMS,
            repeats=max(self.rollbacks - 1, 0),
            measures=tuple(self.measures),
            lr_path=tuple(self.lr_path),
            checkpoint=self.checkpoint,
            batches=self.batches,
            left_out=self.left_out,
            evidence=self.evidence,
            stop_step=self.stop_step,
            undone=self.undone,
        )


def add_names(to: list[str], names: Sequence[str]) -> None:
    """Adds the names that are not in the list."""
    to.extend(name for name in names if name not in to)


def batches_of(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """(epoch, index) of the batches that an event names."""
    return tuple((epoch, index) for epoch, index in event.batches or ())


class Counts(NamedTuple):
    """Counts of one run, or of one replay."""

    incidents: int = 0
    rollbacks: int = 0  # incidents with a rollback
    repeats: int = 0  # rollbacks beyond one per incident
    denied: int = 0  # rollbacks that the budget did not grant
    stops: int = 0
    skips: int = 0  # skipped steps, undone ones too
    undone_incidents: int = 0  # those that began after a step to which the run went back later
    undone_skips: int = 0  # skipped steps that a rollback or a restart has undone
    clips: int | None = None  # steps with clipped gradients; None: not known
    alarms: int | None = None  # steps with a cause; None: not known


def counts_of(incidents: Sequence[Incident], **more: int | None) -> Counts:
    """Counts incidents; `more` are fields that incidents do not have, or better values."""
    return Counts(
        incidents=len(incidents),
        rollbacks=sum("ROLLBACK" in each.action for each in incidents),
        repeats=sum(each.repeats for each in incidents),
        stops=sum("STOP" in each.action for each in incidents),
        skips=sum(each.skipped for each in incidents),
        undone_incidents=sum(each.undone for each in incidents),
    )._replace(**more)
