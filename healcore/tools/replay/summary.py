"""What a replay of one trace under one policy comes to."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from healcore.core.verdict import Action, Cause
from healcore.tools.replay.decided import Judged


class AttemptSummary(NamedTuple):
    """One attempt of a run that was resumed.

    What happened in it counts, also where a later attempt replaced its end.
    """

    number: int
    source: str
    first_step: float
    rows: int
    incidents: int
    rollbacks: int


class Summary(NamedTuple):
    """One trace under one policy."""

    trace: str
    policy: str
    fingerprint: str
    rows: int
    unjudged: int
    """Rows without a loss and a gradient norm."""
    first_step: float
    last_step: float
    attempts: tuple[AttemptSummary, ...]
    alarms: int
    """Rows with a cause."""
    causes: dict[str, int]
    """Rows with each cause."""
    actions: dict[str, int]
    """Rows with each order; ROLLBACK wherever one was due."""
    skips: int
    clips: int
    incidents: int
    rollbacks: int
    """Rows at which one was due, those that the budget did not pay for included."""
    spent: int
    """Those that the budget did not pay for."""
    first_incident: float | None
    last_incident: float | None
    """Steps at which they begin."""
    first_rollback: float | None
    last_rollback: float | None
    """Steps."""
    lowest_lr: float
    """Smallest learning-rate multiplier."""
    stopped_at: int | None
    """Index of the row at which a live run would have ended."""
    stopped_step: float | None
    resting: tuple[str, ...]
    """What of the policy could not be replayed, in words."""
    problems: int
    """Lines of the trace that could not be read."""


class Tally:
    """Counts chunk by chunk."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.alarms = self.skips = self.clips = self.rollbacks = self.spent = 0
        self.first_rollback: float | None = None
        self.last_rollback: float | None = None
        self.lowest_lr = 1.0
        self.stopped_at: int | None = None
        self.stopped_step: float | None = None

    def add(self, judged: Judged) -> int:
        """Counts one chunk of at least one row; returns the rollbacks that were due in it."""
        verdict, action = judged.verdict, judged.action
        self.causes += _count(verdict.cause, Cause)
        self.actions += _count(action, Action)
        self.alarms += int(np.count_nonzero(verdict.cause))
        self.skips += int(np.count_nonzero(verdict.skip))
        self.clips += int(np.count_nonzero(judged.clipped))
        back = np.flatnonzero(action & int(Action.ROLLBACK))
        if back.size:
            self.rollbacks += back.size
            self.spent += int(np.count_nonzero(judged.spent))
            if self.first_rollback is None:
                self.first_rollback = float(judged.step[back[0]])
            self.last_rollback = float(judged.step[back[-1]])
        self.lowest_lr = min(self.lowest_lr, float(str(verdict.lr_scale.min())))
        stops = np.flatnonzero(action & int(Action.STOP))
        if stops.size and self.stopped_at is None:
            self.stopped_at = int(judged.index[stops[0]])
            self.stopped_step = float(judged.step[stops[0]])
        return back.size


def in_order(counts: Counter[str], kind: type[Cause] | type[Action]) -> dict[str, int]:
    """Lowest flag first, without those that never occurred."""
    named = (str(each.name) for each in kind)
    return {name: counts[name] for name in named if counts[name]}


def _count(flags: np.ndarray, kind: type[Cause] | type[Action]) -> Counter[str]:
    """Rows with each flag, by name."""
    if not flags.any():
        return Counter()
    return Counter({str(each.name): int(np.count_nonzero(flags & int(each))) for each in kind})
