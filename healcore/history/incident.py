"""One incident of a run: why, what was done about it, and what that came to."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.runtime.events.models import EventRecord

MOST_ALARMS = 100
"""Alarms that get an event of their own: in each incident, and in all outside of incidents."""

_EVIDENCE = 5
"""Tensors that are kept of one incident."""


class Mode(enum.StrEnum):
    """Whether what is listed was done, or what a policy would have done."""

    HEAL = "heal"
    OBSERVE = "observe"
    REPLAY = "replay"
    """From recorded rows: nothing was there to go back to."""


class IncidentOutcome(enum.StrEnum):
    """What an incident came to. Which steps, checkpoints and rates: the incident's own fields."""

    STOP = "stop"
    ROLLBACK = "rollback"
    """Also where the same incident came to a stop later on."""
    SKIP = "skip"
    ALERT = "alert"


class Incident(NamedTuple):
    """A run of alarms with one onset."""

    number: int
    """From 1, over the whole run."""
    attempt: int
    onset_step: float
    step: float
    """Of the order, or of the last alarm."""
    cause: tuple[str, ...] = ()
    action: tuple[str, ...] = ()
    """What was ordered of the host; unless `mode` is HEAL, what would have been."""
    mode: Mode = Mode.HEAL
    skipped: int = 0
    """Steps of it that were skipped."""
    capped: bool = False
    """It may have had alarms without an event of their own: `skipped` is the least."""
    clipped: int | None = None
    """Steps of it whose gradients were clipped; None: not counted."""
    repeats: int = 0
    """Rollbacks after the first one: what would follow had going back not helped, unless HEAL."""
    denied: bool = False
    """The budget did not grant the first rollback: the run would stop."""
    repeat_denied: bool = False
    """... nor one of the repeats."""
    measures: tuple[EventRecord, ...] = ()
    """Rollbacks, answers of hooks, verdicts of re-runs and the stop, in order."""
    lr_path: tuple[float, ...] = ()
    """Multipliers of the learning rate that it went through, the one before it first."""
    checkpoint: int | None = None
    """Step of the checkpoint that was gone back to."""
    batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches that were left out, or else of those in which it began."""
    left_out: bool = False
    """Whether `batches` were left out."""
    evidence: tuple[Evidence, ...] = ()
    """Tensors that stood out, the worst first."""
    onset: int = -1
    """Index of the row of its first alarm; -1: not known."""
    index: int = -1
    """Index of the row of `step`; -1: not known."""
    stop: int = -1
    """Index of the row at which the stop was ordered; -1: not known."""
    stop_step: float | None = None
    """Step at which the stop was ordered; None: none was, or it is not known where."""
    last: int = -1
    """Index of the row of its last alarm; -1: it is `index`."""
    last_step: float | None = None
    """Step of its last alarm; None: it is `step`."""

    @property
    def outcome(self) -> IncidentOutcome:
        """The gravest, but for a stop after a rollback."""
        if "ROLLBACK" in self.action:
            return IncidentOutcome.ROLLBACK
        if "STOP" in self.action:
            return IncidentOutcome.STOP
        return IncidentOutcome.SKIP if self.skipped else IncidentOutcome.ALERT

    @property
    def end(self) -> tuple[float, int]:
        """Step and index of the last that is known of it."""
        if self.last_step is None:
            return self.step, self.index
        return self.last_step, self.last

    @property
    def lr_before(self) -> float | None:
        """Multiplier of the learning rate; None: it was not changed."""
        return self.lr_path[0] if self.lr_path else None

    @property
    def lr_after(self) -> float | None:
        """Multiplier of the learning rate; None: it was not changed."""
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

    def seen(self, event: EventRecord) -> None:
        """An alarm or an order of it."""
        self.step = max(self.step, float(event.step or 0))
        self.observed |= bool(event.observed)
        add_names(self.cause, event.cause or ())
        add_names(self.action, event.action or ())
        if event.kind == "alarm":
            self.alarms += 1
            self.skipped += bool(event.skip)
            if not self.evidence:
                found = (event.evidence or ())[:_EVIDENCE]
                self.evidence = tuple(Evidence(each.name, each.grad_norm) for each in found)
            return
        ordered = event.action or ()
        self.rollbacks += self.observed and "ROLLBACK" in ordered
        if "STOP" in ordered and self.stop_step is None:
            self.stop_step = float(event.step or 0)

    def cut(self, before: float | None, after: float | None) -> None:
        """The learning rate was cut; one event or two may have said so."""
        if before is None or after is None:
            return
        if not self.lr_path:
            self.lr_path = [before]
        if after != self.lr_path[-1]:
            self.lr_path.append(after)

    def incident(self) -> Incident:
        """What is known by now; not where its rows are."""
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
        )


def add_names(to: list[str], names: Sequence[str]) -> None:
    """Adds those that are not there yet."""
    to.extend(name for name in names if name not in to)


def batches_of(event: EventRecord) -> tuple[tuple[int, int], ...]:
    """(epoch, index) of the batches that an event names."""
    return tuple((epoch, index) for epoch, index in event.batches or ())
