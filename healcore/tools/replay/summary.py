"""Holds the decisions about rows, and sums them up: counts and incidents of one replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.runtime.postmortem.sentences import listed

MOST_KEPT = 1000
"""Incidents of one replay that are kept for the report; all are counted."""


class JudgedRows(NamedTuple):
    """Consecutive judged rows of one attempt.

    All arrays, including the fields of `record`, are (n,). `index` is int64, `step` float64.
    """

    index: np.ndarray
    step: np.ndarray
    attempt: int
    given: dict[str, np.ndarray]
    """bool by signal: logged in this row."""
    record: StepRecord
    due: np.ndarray
    """bool: a rollback was due, whether or not the budget still allowed it."""
    again: np.ndarray
    """bool: a rollback was due earlier in the row's incident; see `RepeatMarker`."""
    ends: np.ndarray
    """bool: a live run ends here, even if every rollback before had helped."""

    @property
    def spent(self) -> np.ndarray:
        """bool: see `Decided.spent`."""
        return self.due & (self.record.action & int(Action.ROLLBACK) == 0)

    @property
    def action(self) -> np.ndarray:
        """int32: the orders, with ROLLBACK wherever a rollback was due."""
        return self.record.action | np.where(self.due, int(Action.ROLLBACK), 0)

    @property
    def clipped(self) -> np.ndarray:
        """bool: the gradient was scaled down, and the step not skipped."""
        return (self.record.grad_scale < 1) & ~self.record.skip

    @property
    def decided(self) -> np.ndarray:
        """bool: the decision is not the neutral one."""
        record = self.record
        return (
            (record.cause != 0)
            | (record.action != 0)
            | record.skip
            | (record.grad_scale != 1)
            | (record.lr_scale != 1)
            | self.due
        )


class RepeatMarker:
    """Remembers the last incident in which a rollback was due."""

    def __init__(self) -> None:
        self._ordered = (-1, -1)
        self._denied = (-1, -1)

    def mark(self, judged: JudgedRows) -> JudgedRows:
        """Sets `again` and `ends` of the next rows; keeps one denied rollback per incident."""
        record = judged.record
        again = np.zeros(len(judged.index), bool)
        if judged.attempt == self._ordered[0]:
            again = record.incident == self._ordered[1]
        for row in np.flatnonzero(judged.due):
            incident = (judged.attempt, int(record.incident[row]))
            if incident != self._ordered:
                self._ordered = incident
                again[row + 1 :] = record.incident[row + 1 :] == incident[1]
        # The engine orders STOP when it denies a due rollback; a rule may order STOP itself.
        ends = (record.action & int(Action.STOP) != 0) & ~(again & judged.due)
        due = judged.due.copy()
        for row in np.flatnonzero(judged.spent):
            incident = (judged.attempt, int(record.incident[row]))
            due[row] = incident != self._denied
            self._denied = incident
        return judged._replace(due=due, again=again, ends=ends)


def shortest(number: np.float32) -> float:
    """The float with the fewest digits that is this float32: 0.1, not 0.10000000149011612."""
    return float(str(number))


@dataclass
class AttemptSummary:
    """One attempt of a resumed run; rows that a later attempt replaced count too."""

    number: int
    source: str
    first_step: float
    rows: int = 0
    incidents: int = 0
    rollbacks: int = 0
    repeats: int = 0


@dataclass(kw_only=True)
class Summary:
    """One trace under one policy, counted chunk by chunk.

    `first_*`, `last_*` and `stopped_step` are steps.
    """

    trace: str
    policy: str
    fingerprint: str
    rows: int = 0
    unjudged: int = 0
    """Rows without a loss and a gradient norm."""
    first_step: float
    last_step: float
    attempts: tuple[AttemptSummary, ...]
    alarms: int = 0
    """Rows with a cause."""
    causes: dict[str, int] = field(default_factory=dict)
    """Rows with each cause, lowest flag first."""
    actions: dict[str, int] = field(default_factory=dict)
    """Rows with each order, with ROLLBACK wherever a rollback was due."""
    skips: int = 0
    clips: int = 0
    incidents: int = 0
    rollbacks: int = 0
    """Rows at which a rollback was due, including repeated and denied rollbacks."""
    repeats: int = 0
    """Rollbacks after the first of an incident. A live run has them if the first did not help."""
    spent: int = 0
    """Rollbacks that the budget denied, at most one per incident."""
    first_incident: float | None = None
    last_incident: float | None = None
    first_rollback: float | None = None
    last_rollback: float | None = None
    repeat_cuts: int = 0
    """Cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float = 1.0
    """The smallest learning-rate multiplier."""
    lowest_lr_first: float = 1.0
    """The smallest multiplier without repeat cuts."""
    stopped_at: int | None = None
    """Row index of a live run's end: a rule stops it, or an incident's first rollback is denied."""
    stopped_step: float | None = None
    inactive: dict[str, tuple[str, ...]]
    """Inactive parts of the policy, by the signal that the trace does not log."""
    problems: int
    """Lines of the trace that could not be read."""

    @property
    def first_rollbacks(self) -> int:
        """Rollbacks that are the first of their incident."""
        return self.rollbacks - self.repeats

    @property
    def first_cuts(self) -> int:
        """Cuts of the learning rate, without repeated cuts."""
        return self.actions.get("CUT_LR", 0) - self.repeat_cuts

    def attempt(self, number: int) -> AttemptSummary:
        """The attempt of this number."""
        return next(each for each in self.attempts if each.number == number)

    def add(self, rows: int, judged: JudgedRows) -> None:
        """Counts a chunk of `rows` rows, of which `judged` could be judged; incidents are apart."""
        record, action, attempt = judged.record, judged.action, self.attempt(judged.attempt)
        self.rows += rows
        attempt.rows += rows
        self.unjudged += rows - len(judged.index)
        self.causes = _summed(self.causes, record.cause, Cause)
        self.actions = _summed(self.actions, action, Action)
        self.alarms += int(np.count_nonzero(record.cause))
        self.skips += int(np.count_nonzero(record.skip))
        self.clips += int(np.count_nonzero(judged.clipped))
        back = np.flatnonzero(action & int(Action.ROLLBACK))
        if back.size:
            repeats = int(np.count_nonzero(judged.again[back]))
            for counts in (self, attempt):
                counts.rollbacks += back.size
                counts.repeats += repeats
            self.spent += int(np.count_nonzero(judged.spent))
            if self.first_rollback is None:
                self.first_rollback = float(judged.step[back[0]])
            self.last_rollback = float(judged.step[back[-1]])
        cuts = action & int(Action.CUT_LR) != 0
        self.repeat_cuts += int(np.count_nonzero(cuts & judged.again))
        lasting = record.action & int(Action.SOFT_STEP) == 0
        self.lowest_lr = _lowest(self.lowest_lr, record.lr_scale[lasting])
        firsts = record.lr_scale[cuts & ~judged.again]
        self.lowest_lr_first = _lowest(self.lowest_lr_first, firsts)
        stops = np.flatnonzero(judged.ends)
        if stops.size and self.stopped_at is None:
            self.stopped_at = int(judged.index[stops[0]])
            self.stopped_step = float(judged.step[stops[0]])


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """The parts of a policy that are inactive without a signal, as text."""
    logged = {
        "group_norms": "in any log (AdaGC reads every tensor's)",
        "update": "in any log (its norm without the learning-rate multiplier)",
    }.get(signal, "logged")
    verb = "is" if len(parts) == 1 else "are"
    return f"no {signal} {logged}: {listed(parts)} {verb} inactive"


def _summed(
    counts: dict[str, int], flags: np.ndarray, kind: type[Cause] | type[Action]
) -> dict[str, int]:
    if not flags.any():
        return counts
    rows = {str(each.name): int(np.count_nonzero(flags & int(each))) for each in kind}
    summed = {name: counts.get(name, 0) + more for name, more in rows.items()}
    return {name: count for name, count in summed.items() if count}


def _lowest(known: float, scales: np.ndarray) -> float:
    return min(known, shortest(scales.min())) if scales.size else known


class _OpenIncident:
    """An incident while its rows are read, with the attributes of an `Incident`."""

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
    """Builds the incidents chunk by chunk, and counts them in the summary."""

    def __init__(self, summary: Summary) -> None:
        self.kept: list[Incident] = []
        self._summary = summary
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
        summary = self._summary
        summary.incidents += 1
        summary.attempt(incident.attempt).incidents += 1
        if summary.first_incident is None:
            summary.first_incident = incident.onset_step
        summary.last_incident = incident.onset_step
        if len(self.kept) == MOST_KEPT:
            return
        cut = bool(incident.action & Action.CUT_LR)
        fields = vars(incident) | {
            "cause": tuple(names(incident.cause)),
            "action": tuple(names(incident.action)),
            "lr_path": (incident.lr_before, incident.lr_after) if cut else (),
        }
        del fields["lr_before"], fields["lr_after"]
        self.kept.append(Incident(number=summary.incidents, mode=Mode.REPLAY, **fields))
