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
    """Those after the first of their incident. They occur live only if the first did not help."""
    spent: int
    """Those that the budget denied, at most one per incident."""
    first_incident: float | None
    last_incident: float | None
    first_rollback: float | None
    last_rollback: float | None
    repeat_cuts: int
    """Cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float
    """The smallest learning-rate multiplier."""
    lowest_lr_first: float
    """The same without repeat cuts."""
    stopped_at: int | None
    """Row index of a live run's end: a rule stops it, or an incident's first rollback is denied."""
    stopped_step: float | None
    resting: tuple[str, ...]
    """See `Replay.resting`."""
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


def in_order(counts: Counter[str], kind: type[Cause] | type[Action]) -> dict[str, int]:
    """Lowest flag first, without those that never occurred."""
    named = (str(each.name) for each in kind)
    return {name: counts[name] for name in named if counts[name]}


def _count(flags: np.ndarray, kind: type[Cause] | type[Action]) -> Counter[str]:
    if not flags.any():
        return Counter()
    return Counter({str(each.name): int(np.count_nonzero(flags & int(each))) for each in kind})


MOST_KEPT = 1000
"""Incidents of one replay that are kept for the report; all are counted."""


class _OpenIncident:
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
        self._close()
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
                self._close()
                before = self._lr if row == 0 else shortest(record.lr_scale[row - 1])
                self._open = _OpenIncident(judged, row, before)
            if self._open is not None:
                self._open.add(judged, row, int(action[row]), bool(spent[row]))
        self._number = int(record.incident[-1])
        self._lr = shortest(record.lr_scale[-1])

    def close(self) -> None:
        """Ends the open incident at the trace's end."""
        self._close()

    def _close(self) -> None:
        case, self._open = self._open, None
        if case is None:
            return
        self.count += 1
        self.first = case.onset_step if self.first is None else self.first
        self.last = case.onset_step
        self.by_attempt[case.attempt] += 1
        if len(self.kept) == MOST_KEPT:
            return
        cut = bool(case.action & Action.CUT_LR)
        self.kept.append(
            Incident(
                number=self.count,
                attempt=case.attempt,
                onset=case.onset,
                index=case.index,
                onset_step=case.onset_step,
                step=case.step,
                cause=tuple(names(case.cause)),
                action=tuple(names(case.action)),
                skipped=case.skipped,
                mode=Mode.REPLAY,
                clipped=case.clipped,
                repeats=case.repeats,
                denied=case.denied,
                repeat_denied=case.repeat_denied,
                lr_path=(case.lr_before, case.lr_after) if cut else (),
                stop=case.stop,
                stop_step=case.stop_step,
                last=case.last,
                last_step=case.last_step,
            )
        )


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
