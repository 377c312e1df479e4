"""What the host remembers of a run: healthy and unhealthy steps, incidents, rollbacks.

Steps are indexed from 0; step n is taken by the state that a checkpoint of step n holds.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Cause, names

_REMEMBERED = 1000
"""Incidents kept; of a run with more the first ones are the least interesting."""


class PastRollback(NamedTuple):
    """A rollback that was carried out."""

    onset: int
    """First alarm of the incident it answered."""
    target: int
    """Step of the checkpoint that was restored."""


@dataclass
class IncidentRecord:
    """One incident, from its first alarm to its last."""

    number: int
    """From 1, over the whole run; rollbacks do not set it back."""
    onset: int
    """Index of the step with the first alarm."""
    last: int
    """Index of the step with the last one so far."""
    cause: int
    """`Cause` flags of all its alarms."""
    first: dict[str, int] = field(default_factory=dict)
    """Name of a cause -> index of the first step with it."""
    alarms: int = 0
    skips: int = 0
    rollbacks: int = 0
    lr_scale: float = 1.0
    """The multiplier after it."""
    over: bool = False


@dataclass
class Ledger:
    """Filled by `judge`, step by step, in order."""

    judged: int = 0
    """Index of the next step to be judged."""
    unhealthy: list[int] = field(default_factory=list)
    """Indices of steps with an alarm that some rule acts on, ascending."""
    episodes: list[IncidentRecord] = field(default_factory=list)
    earlier: list[PastRollback] = field(default_factory=list)
    """Rollbacks so far."""
    counted: int = 0
    """Episodes so far, also those forgotten."""
    open: bool = False

    def judge(self, index: int, records: Sequence[StepRecord]) -> IncidentRecord | None:
        """Takes one step.

        Args:
            index: of the step.
            records: of its engines.

        Returns:
            The episode that the step is part of, if it is trouble.
        """
        self.judged = index + 1
        self.open = any(each.incident_open for each in records)
        cause = 0
        for each in records:
            # An alert alone (a clipped gradient spike, a plateau) opens no incident.
            if each.incident_open or each.skip:
                cause |= int(each.cause)
        if not cause:
            if not self.open and self.episodes:
                self.episodes[-1].over = True
            return None
        self.unhealthy.append(index)
        episode = self._current(index)
        episode.last = index
        episode.cause |= cause
        for name in names(Cause(cause)):
            episode.first.setdefault(name, index)
        episode.alarms += 1
        episode.skips += any(each.skip for each in records)
        episode.lr_scale = min(each.lr_scale for each in records)
        return episode

    def _current(self, index: int) -> IncidentRecord:
        if not self.episodes or self.episodes[-1].over:
            self.counted += 1
            self.episodes.append(IncidentRecord(self.counted, index, index, 0))
            del self.episodes[:-_REMEMBERED]
        return self.episodes[-1]

    def went_back(self, onset: int, target: int, *, counts: bool = True) -> None:
        """A rollback to the checkpoint of step `target` was carried out.

        Args:
            onset: of the incident it answers.
            target: the checkpoint's step.
            counts: False for a trial, which the next choice need not know of.
        """
        if counts:
            self.earlier.append(PastRollback(onset, target))
        self.judged = target
        self.open = False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, target) :]
        if self.episodes:
            self.episodes[-1].rollbacks += 1
            self.episodes[-1].over = True

    def forget(self, before: int) -> None:
        """Drops unhealthy steps that no checkpoint's probation can depend on any more."""
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, before)]

    def take_over(self, other: Ledger, step: int) -> None:
        """Goes on from the ledger of an earlier process, at a checkpoint of `step`."""
        vars(self).update(vars(other))
        self.judged, self.open = step, False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, step) :]
        if self.episodes:
            self.episodes[-1].over = True

    # -- saving ---------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe."""
        return {**asdict(self), "earlier": [list(each) for each in self.earlier]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Ledger:
        """What `to_dict` gave."""
        return cls(
            judged=data["judged"],
            unhealthy=list(data["unhealthy"]),
            episodes=[IncidentRecord(**each) for each in data["episodes"]],
            earlier=[PastRollback(*each) for each in data["earlier"]],
            counted=data["counted"],
            open=data["open"],
        )
