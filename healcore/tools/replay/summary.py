"""Sums up the replay of one trace under one policy: counts, incidents, and lines of JSON."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.tools.replay.decisions import Decided, JudgedRows, shortest

MOST_KEPT = 1000
"""Incidents of one replay that are kept for the report; all are counted."""


class AttemptSummary(NamedTuple):
    """One attempt of a resumed run; rows that a later attempt replaced count too."""

    number: int
    source: str
    first_step: float
    rows: int
    incidents: int
    rollbacks: int
    repeats: int


class Summary(NamedTuple):
    """One trace under one policy. `first_*`, `last_*` and `stopped_step` are steps."""

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
    """Rows at which one was due, repeats and denied ones included."""
    repeats: int
    """Rollbacks after the first of an incident; live they occur only if the first did not help."""
    spent: int
    """Rollbacks that the budget denied, at most one per incident."""
    first_incident: float | None
    last_incident: float | None
    first_rollback: float | None
    last_rollback: float | None
    repeat_cuts: int
    """Cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float
    """The smallest learning-rate multiplier."""
    lowest_lr_first: float
    """The smallest multiplier without repeat cuts."""
    stopped_at: int | None
    """Row index of a live run's end: a rule stops it, or an incident's first rollback is denied."""
    stopped_step: float | None
    resting: tuple[str, ...]
    """See `Replay.resting`."""
    problems: int
    """Lines of the trace that could not be read."""


class SummaryCounter:
    """Counts chunk by chunk. The attributes are those of a `Summary`."""

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

    def add(self, judged: JudgedRows) -> tuple[int, int]:
        """Counts a chunk of at least one row; returns the numbers of its rollbacks and repeats."""
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
        lasting = record.lr_scale[record.action & int(Action.SOFT_STEP) == 0]
        if lasting.size:
            self.lowest_lr = min(self.lowest_lr, float(str(lasting.min())))
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

    def fields(self) -> dict[str, Any]:
        """The counts by their names in a `Summary`."""
        return vars(self) | {
            "causes": _in_order(self.causes, Cause),
            "actions": _in_order(self.actions, Action),
        }


def _in_order(counts: Counter[str], kind: type[Cause] | type[Action]) -> dict[str, int]:
    """Lowest flag first, without those that never occurred."""
    return {str(each.name): counts[str(each.name)] for each in kind if counts[str(each.name)]}


def _count(flags: np.ndarray, kind: type[Cause] | type[Action]) -> Counter[str]:
    if not flags.any():
        return Counter()
    return Counter({str(each.name): int(np.count_nonzero(flags & int(each))) for each in kind})


class _OpenIncident:
    """An incident while its rows are read; the attributes are those of an `Incident`."""

    def __init__(self, judged: JudgedRows, row: int, lr_before: float) -> None:
        self.attempt = judged.attempt
        self.onset, self.onset_step = int(judged.index[row]), float(judged.step[row])
        self.index, self.step = self.onset, self.onset_step
        self.last, self.last_step = self.onset, self.onset_step
        self.stop = -1
        self.stop_step: float | None = None
        self.cause, self.action = Cause(0), Action(0)
        self.skipped = self.clipped = 0
        self.denied = self.repeat_denied = False
        self.repeats = 0
        self.lr_before = self.lr_after = lr_before

    def add(self, judged: JudgedRows, row: int, action: int, spent: bool) -> None:
        self.last, self.last_step = int(judged.index[row]), float(judged.step[row])
        self.cause |= Cause(int(judged.record.cause[row]))
        ordered = Action.ROLLBACK | Action.STOP
        if not self.action & ordered:  # the incident is placed at the first such order
            self.index, self.step = int(judged.index[row]), float(judged.step[row])
        again = bool(judged.again[row])
        if not judged.ends[row]:
            action &= ~int(Action.STOP)
        elif action & Action.STOP and self.stop < 0:
            self.stop, self.stop_step = self.last, self.last_step
        self.action |= Action(action)
        self.skipped += bool(judged.record.skip[row])
        self.clipped += bool(judged.clipped[row])
        if again:  # happens live only if going back did not help; a recorded curve never heals
            self.repeats += bool(action & Action.ROLLBACK) and not spent
            self.repeat_denied |= spent
        else:
            self.denied |= spent
            self.lr_after = shortest(judged.record.lr_scale[row])


class ReplayIncidents:
    """Builds the incidents chunk by chunk."""

    def __init__(self) -> None:
        self.kept: list[Incident] = []
        self.count = 0
        self.first: float | None = None
        self.last: float | None = None
        self.by_attempt: Counter[int] = Counter()
        self._open: _OpenIncident | None = None
        self._number = 0
        self._lr = 1.0

    def begin_attempt(self, *, goes_on: bool) -> None:
        """Ends the open incident; `goes_on`: the engine's incident count and LR multiplier stay."""
        self.close()
        if not goes_on:
            self._number, self._lr = 0, 1.0

    def add(self, judged: JudgedRows) -> None:
        """Adds one chunk."""
        record, action, spent = judged.record, judged.action, judged.spent
        previous = np.concatenate(([self._number], record.incident[:-1]))
        opened = record.incident != previous
        alarmed = (record.incident_open | record.skip) & (record.cause != 0)
        for row in np.flatnonzero(opened | alarmed).tolist():
            if opened[row]:
                self.close()
                before = self._lr if row == 0 else shortest(record.lr_scale[row - 1])
                self._open = _OpenIncident(judged, row, before)
            if self._open is not None:
                self._open.add(judged, row, int(action[row]), bool(spent[row]))
        self._number = int(record.incident[-1])
        self._lr = shortest(record.lr_scale[-1])

    def close(self) -> None:
        """Ends the open incident, if any."""
        incident, self._open = self._open, None
        if incident is None:
            return
        self.count += 1
        self.first = incident.onset_step if self.first is None else self.first
        self.last = incident.onset_step
        self.by_attempt[incident.attempt] += 1
        if len(self.kept) == MOST_KEPT:
            return
        cut = bool(incident.action & Action.CUT_LR)
        fields = vars(incident) | {
            "cause": tuple(names(incident.cause)),
            "action": tuple(names(incident.action)),
            "lr_path": (incident.lr_before, incident.lr_after) if cut else (),
        }
        del fields["lr_before"], fields["lr_after"]
        self.kept.append(Incident(number=self.count, mode=Mode.REPLAY, **fields))


def decided_line(trace: str, policy: str, row: Decided) -> str:
    """One row whose decision is not neutral, newline included."""
    line: dict[str, Any] = {
        "trace": trace,
        "index": row.index,
        "step": _number(row.step),
        "cause": _names(row.cause),
        "action": _names(row.action),
        "skip": row.skip,
        "grad_scale": row.grad_scale,
        "lr_scale": row.lr_scale,
        "z": row.z,
    }
    if row.threshold is not None:
        line["threshold"] = row.threshold
    line |= {"attempt": row.attempt, "policy": policy}
    if row.spent:
        line["spent"] = True
    return _line(line)


def summary_line(summary: Summary) -> str:
    """The summary of one trace under one policy, newline included."""
    line = {"trace": summary.trace, "summary": True, "steps": summary.rows - summary.unjudged}
    for name, value in summary._asdict().items():
        if name != "trace":
            line[name] = _number(value) if isinstance(value, float) else value
    line["attempts"] = [
        {**each._asdict(), "first_step": _number(each.first_step)} for each in summary.attempts
    ]
    return _line(line)


@functools.lru_cache(maxsize=4096, typed=True)  # typed: Cause(4) == Action(4)
def _names(flags: Cause | Action) -> list[str]:
    """Cached `names`: few combinations occur, and naming them is the slowest part of a line."""
    return names(flags)


def _number(number: float) -> float | int | str:
    """Whole numbers as int; what JSON cannot express (NaN, Inf) as text, as in the events."""
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
