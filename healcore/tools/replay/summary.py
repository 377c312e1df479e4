"""Summarizes the decisions of one replay: counts and incidents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.runtime.postmortem.sentences import listed

MAX_INCIDENTS = 1000
"""Number of incidents of one replay that are kept for the report; all are counted."""


class JudgedRows(NamedTuple):
    """Consecutive judged rows of one attempt. Arrays are (n,), `index` int64, `step` float64."""

    index: np.ndarray
    step: np.ndarray
    attempt: int
    logged: dict[str, np.ndarray]
    """bool by signal: whether the row logs the signal."""
    record: StepRecord
    """Decisions, with fields of shape (n,)."""
    due: np.ndarray
    """bool: a rollback is due, even if the budget denies it."""
    repeated: np.ndarray
    """bool: a rollback was due earlier in the same incident; see `RepeatMarker`."""
    ends_run: np.ndarray
    """bool: a live run ends here, even if all earlier rollbacks helped."""

    @property
    def spent(self) -> np.ndarray:
        """bool: a rollback is due, but the budget denies it."""
        return self.due & (self.record.action & int(Action.ROLLBACK) == 0)

    @property
    def action(self) -> np.ndarray:
        """int32: the orders, with ROLLBACK at each row where a rollback is due."""
        return self.record.action | np.where(self.due, int(Action.ROLLBACK), 0)

    @property
    def clipped(self) -> np.ndarray:
        """bool: the gradient is scaled down, and the step is not skipped."""
        return (self.record.grad_scale < 1) & ~self.record.skip

    @property
    def decided(self) -> np.ndarray:
        """bool: the decision is not neutral."""
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
    """Marks repeated rollbacks across chunks."""

    def __init__(self) -> None:
        self._ordered = (-1, -1)  # attempt and number of the last incident with a rollback due
        self._denied = (-1, -1)  # attempt and number of the last incident with a denied rollback

    def mark(self, judged: JudgedRows) -> JudgedRows:
        """Sets `repeated` and `ends_run`; keeps only the first denied rollback of an incident."""
        record = judged.record
        repeated = np.zeros(len(judged.index), bool)
        if judged.attempt == self._ordered[0]:
            repeated = record.incident == self._ordered[1]
        for row in np.flatnonzero(judged.due):
            incident = (judged.attempt, int(record.incident[row]))
            if incident != self._ordered:
                self._ordered = incident
                repeated[row + 1 :] = record.incident[row + 1 :] == incident[1]
        # The engine orders STOP if it denies a due rollback. A rule may also order STOP.
        ends_run = (record.action & int(Action.STOP) != 0) & ~(repeated & judged.due)
        due = judged.due.copy()
        for row in np.flatnonzero(judged.spent):
            incident = (judged.attempt, int(record.incident[row]))
            due[row] = incident != self._denied
            self._denied = incident
        return judged._replace(due=due, repeated=repeated, ends_run=ends_run)


def shortest(number: np.float32) -> float:
    """Converts a float32 to the float with the fewest digits: 0.1, not 0.10000000149011612."""
    return float(str(number))


@dataclass
class AttemptSummary:
    """Counts of one attempt, including rows that a later attempt replaced."""

    number: int
    source: str
    first_step: float
    rows: int = 0
    incidents: int = 0
    rollbacks: int = 0
    repeats: int = 0


@dataclass(kw_only=True)
class Summary:
    """Counts of one trace under one policy.

    `first_*`, `last_*` and `stopped_step` are steps.
    """

    trace: str
    policy: str
    fingerprint: str
    rows: int = 0
    unjudged: int = 0
    """Number of rows without a loss and a gradient norm."""
    first_step: float
    last_step: float
    attempts: tuple[AttemptSummary, ...]
    alarms: int = 0
    """Number of rows with a cause."""
    causes: dict[str, int] = field(default_factory=dict)
    """Number of rows by cause, lowest flag first."""
    actions: dict[str, int] = field(default_factory=dict)
    """Number of rows by order, with ROLLBACK at each row where a rollback was due."""
    skips: int = 0
    clips: int = 0
    incidents: int = 0
    rollbacks: int = 0
    """Number of rows where a rollback was due, including repeated and denied rollbacks."""
    repeats: int = 0
    """Number of rollbacks after the first of their incident. Live, only failed ones repeat."""
    spent: int = 0
    """Number of rollbacks that the budget denied, at most one per incident."""
    first_incident: float | None = None
    last_incident: float | None = None
    first_rollback: float | None = None
    last_rollback: float | None = None
    repeat_cuts: int = 0
    """Number of cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float = 1.0
    """The smallest learning-rate multiplier."""
    lowest_lr_first: float = 1.0
    """The smallest multiplier without repeat cuts."""
    stopped_at: int | None = None
    """Row where a live run ends: a rule orders STOP, or an incident's first rollback is denied."""
    stopped_step: float | None = None
    inactive: dict[str, tuple[str, ...]]
    """Inactive parts of the policy, by the signal that the trace does not log."""
    problems: int
    """Number of lines of the trace that could not be read."""

    @property
    def first_rollbacks(self) -> int:
        """Number of rollbacks that are the first of their incident."""
        return self.rollbacks - self.repeats

    @property
    def first_cuts(self) -> int:
        """Number of cuts of the learning rate, without repeated cuts."""
        return self.actions.get("CUT_LR", 0) - self.repeat_cuts

    def attempt(self, number: int) -> AttemptSummary:
        """Returns the counts of one attempt."""
        return next(each for each in self.attempts if each.number == number)

    def add(self, rows: int, judged: JudgedRows) -> None:
        """Counts a chunk of `rows` rows. `ReplayIncidents` counts the incidents."""
        record, action, attempt = judged.record, judged.action, self.attempt(judged.attempt)
        self.rows += rows
        attempt.rows += rows
        self.unjudged += rows - len(judged.index)
        self.causes = _add_counts(self.causes, record.cause, Cause)
        self.actions = _add_counts(self.actions, action, Action)
        self.alarms += int(np.count_nonzero(record.cause))
        self.skips += int(np.count_nonzero(record.skip))
        self.clips += int(np.count_nonzero(judged.clipped))
        rollbacks = np.flatnonzero(action & int(Action.ROLLBACK))
        if rollbacks.size:
            repeats = int(np.count_nonzero(judged.repeated[rollbacks]))
            for counts in (self, attempt):
                counts.rollbacks += rollbacks.size
                counts.repeats += repeats
            self.spent += int(np.count_nonzero(judged.spent))
            if self.first_rollback is None:
                self.first_rollback = float(judged.step[rollbacks[0]])
            self.last_rollback = float(judged.step[rollbacks[-1]])
        cuts = action & int(Action.CUT_LR) != 0
        self.repeat_cuts += int(np.count_nonzero(cuts & judged.repeated))
        self.lowest_lr = _lowest(self.lowest_lr, record.lr_scale)
        first_cuts = record.lr_scale[cuts & ~judged.repeated]
        self.lowest_lr_first = _lowest(self.lowest_lr_first, first_cuts)
        stops = np.flatnonzero(judged.ends_run)
        if stops.size and self.stopped_at is None:
            self.stopped_at = int(judged.index[stops[0]])
            self.stopped_step = float(judged.step[stops[0]])


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """Describes the parts of a policy that are inactive without a signal."""
    reason = {
        "group_norms": "in any log (AdaGC reads the norm of every tensor)",
    }.get(signal, "logged")
    verb = "is" if len(parts) == 1 else "are"
    return f"no {signal} {reason}: {listed(parts)} {verb} inactive"


def _add_counts(
    counts: dict[str, int], flags: np.ndarray, kind: type[Cause] | type[Action]
) -> dict[str, int]:
    if not flags.any():
        return counts
    rows = {str(flag.name): int(np.count_nonzero(flags & int(flag))) for flag in kind}
    summed = {name: counts.get(name, 0) + count for name, count in rows.items()}
    return {name: count for name, count in summed.items() if count}


def _lowest(known: float, scales: np.ndarray) -> float:
    return min(known, shortest(scales.min())) if scales.size else known


class _OpenIncident:
    """An incident whose rows are still being read, with the attributes of `Incident`."""

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
        if not self.action & ordered:  # the place of an incident is its first such order
            self.index, self.step = int(judged.index[row]), float(judged.step[row])
        if not judged.ends_run[row]:
            action &= ~int(Action.STOP)
        elif action & Action.STOP and self.stop < 0:
            self.stop, self.stop_step = self.last, self.last_step
        self.action |= Action(action)
        self.skipped += bool(judged.record.skip[row])
        self.clipped += bool(judged.clipped[row])
        if judged.repeated[row]:  # a live run repeats a rollback only if the first did not help
            self.repeats += bool(action & Action.ROLLBACK) and not spent
            self.repeat_denied |= spent
        else:
            self.denied |= spent
            self.lr_after = shortest(judged.record.lr_scale[row])


class ReplayIncidents:
    """Builds the incidents chunk by chunk, and counts them in the summary."""

    def __init__(self, summary: Summary) -> None:
        self.incidents: list[Incident] = []
        """The first `MAX_INCIDENTS` incidents."""
        self._summary = summary
        self._open: _OpenIncident | None = None
        self._number = 0
        self._lr = 1.0

    def begin_attempt(self, *, continues: bool) -> None:
        """Ends the open incident. `continues` keeps the incident number and the LR multiplier."""
        self.close()
        if not continues:
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
        if len(self.incidents) == MAX_INCIDENTS:
            return
        cut = bool(incident.action & Action.CUT_LR)
        fields = vars(incident) | {
            "cause": tuple(names(incident.cause)),
            "action": tuple(names(incident.action)),
            "lr_path": (incident.lr_before, incident.lr_after) if cut else (),
        }
        del fields["lr_before"], fields["lr_after"]
        self.incidents.append(Incident(number=summary.incidents, mode=Mode.REPLAY, **fields))
