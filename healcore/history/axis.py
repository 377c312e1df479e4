"""What a run has besides its curves and incidents: attempts, marks on the axis, single points."""

from __future__ import annotations

import enum
from typing import NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.runtime.events.models import EventRecord


class AttemptOrigin(enum.StrEnum):
    """What an attempt follows on."""

    START = "start"
    PROCESS = "process"
    RESUME = "resume"
    ROLLBACK = "rollback"
    TRIAL = "trial"
    METRICS = "metrics"
    """The metrics have it, and no event."""
    RECORDED = "recorded"
    """The rows of a log that is replayed."""


class RunAttempt(NamedTuple):
    """What follows on a start, a resume or a rollback."""

    number: int
    first_step: float
    origin: AttemptOrigin
    source: str = ""
    """The file that its rows are from, of several."""


class MarkKind(enum.StrEnum):
    """What a mark is: the kind of its event."""

    RESUME = "resume"
    ALARM = "alarm"
    ORDER = "order"
    HOOK = "hook"
    STOP = "stop"
    END = "end"


class Mark(NamedTuple):
    """Something on the axis that is no incident: a resume, a stop, the end."""

    step: float
    kind: MarkKind
    event: EventRecord | None = None
    """None: of a replay, in which nothing happened."""


class AlarmPoint(NamedTuple):
    """A point of the curves that an alarm has."""

    step: float
    attempt: int
    readings: Readings
    lr_scale: float | None
    nonfinite: bool
    """The loss or the norm of the step was not finite; `readings` has the last that was."""


class LastSeen(NamedTuple):
    """What the newest events of the last incident have."""

    cause: tuple[str, ...] = ()
    onset: int | None = None
    readings: Readings | None = None
    evidence: tuple[Evidence, ...] = ()
    batches: tuple[tuple[int, int], ...] = ()


class Malformed(NamedTuple):
    """An event with fields that are not in their shape; they were left out."""

    seq: int
    kind: str
    fields: tuple[str, ...]
