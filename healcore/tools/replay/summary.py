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
    repeats: int
    """As in `Summary`."""


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
    """Rows at which one was due: all of them, repeats and unpaid ones included."""
    repeats: int
    """Those after the first of their incident: what would follow had going back not helped."""
    spent: int
    """Those that the budget did not pay for; of an incident, only the first such one."""
    first_incident: float | None
    last_incident: float | None
    """Steps at which they begin."""
    first_rollback: float | None
    last_rollback: float | None
    """Steps."""
    repeat_cuts: int
    """Cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float
    """Smallest learning-rate multiplier."""
    lowest_lr_first: float
    """Smallest one that a cut which is no repeat came to."""
    stopped_at: int | None
    """Index of the row at which a live run would have ended: a rule stops it, or the budget does
    not pay for the first rollback of an incident."""
    stopped_step: float | None
    resting: tuple[str, ...]
    """What of the policy could not be replayed, in words."""
    problems: int
    """Lines of the trace that could not be read."""


class SummaryCounter:
    """Counts chunk by chunk."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.alarms = self.skips = self.clips = 0
        self.rollbacks = self.repeats = self.spent = self.repeat_cuts = 0
        self.first_rollback: float | None = None
        self.last_rollback: float | None = None
        self.lowest_lr = self.lowest_lr_first = 1.0
        self.stopped_at: int | None = None
        self.stopped_step: float | None = None

    def add(self, judged: Judged) -> tuple[int, int]:
        """Counts one chunk of at least one row.

        Returns:
            The rollbacks that were due in it, and the repeats among them.
        """
        record, action = judged.record, judged.action
        self.causes += _count(record.cause, Cause)
        self.actions += _count(action, Action)
        self.alarms += int(np.count_nonzero(record.cause))
        self.skips += int(np.count_nonzero(record.skip))
        self.clips += int(np.count_nonzero(judged.clipped))
        back = np.flatnonzero(action & int(Action.ROLLBACK))
        repeats = int(np.count_nonzero(judged.again[back]))
        if back.size:
            self.rollbacks += back.size
            self.repeats += repeats
            self.spent += int(np.count_nonzero(judged.spent))
            if self.first_rollback is None:
                self.first_rollback = float(judged.step[back[0]])
            self.last_rollback = float(judged.step[back[-1]])
        self.lowest_lr = min(self.lowest_lr, float(str(record.lr_scale.min())))
        cuts = action & int(Action.CUT_LR) != 0
        self.repeat_cuts += int(np.count_nonzero(cuts & judged.again))
        firsts = record.lr_scale[cuts & ~judged.again]
        if firsts.size:
            self.lowest_lr_first = min(self.lowest_lr_first, float(str(firsts.min())))
        stops = np.flatnonzero(judged.ends)
        if stops.size and self.stopped_at is None:
            self.stopped_at = int(judged.index[stops[0]])
            self.stopped_step = float(judged.step[stops[0]])
        return back.size, repeats


def in_order(counts: Counter[str], kind: type[Cause] | type[Action]) -> dict[str, int]:
    """Lowest flag first, without those that never occurred."""
    named = (str(each.name) for each in kind)
    return {name: counts[name] for name in named if counts[name]}


def _count(flags: np.ndarray, kind: type[Cause] | type[Action]) -> Counter[str]:
    """Rows with each flag, by name."""
    if not flags.any():
        return Counter()
    return Counter({str(each.name): int(np.count_nonzero(flags & int(each))) for each in kind})
