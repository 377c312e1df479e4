"""Defines traces: the recorded rows of a run as whole columns, joined from the logs of its files.

Joining merges records of one step, and numbers the attempts. Steps increase within an attempt. A
new attempt begins where a file begins at or before the last step, or where the step decreases
within a file: the run was resumed, and the earlier rows from that step on are stale. Only the steps
of the loss and of the gradient norm count, separately, because an evaluation that is written late
is no resume.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.logs import SIGNALS, STEP, RawLog, TraceError

_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""
_JUDGED_BITS = ((), (1,), (2,), (1, 2))
"""Bits of the loss and of the gradient norm, by their sum."""


class Rows(NamedTuple):
    """Rows of a trace. Every array is (n,)."""

    step: np.ndarray
    """float64: the recorded step, or the number of the row in a file without steps. Increases
    within an attempt, except for repeated rows and rows that are written late (evaluations)."""
    attempt: np.ndarray
    """int64, from 0. Increases where the recorded run was resumed from an earlier step."""
    values: Mapping[str, np.ndarray]
    """float32 for each signal of the trace: NaN and Inf as recorded, NaN if not logged."""
    logged: Mapping[str, np.ndarray]
    """bool, same keys: whether the row logs the signal. The texts nan and inf are values, an
    empty cell is not."""

    def select(self, where: slice | np.ndarray) -> Rows:
        """Selects some rows."""
        values, logged = (
            {name: column[where] for name, column in columns.items()}
            for columns in (self.values, self.logged)
        )
        return Rows(self.step[where], self.attempt[where], values, logged)


class Attempt(NamedTuple):
    """The part of a run from one start or resume to the next."""

    number: int
    source: str
    """Path of the file in which the attempt begins."""
    first_row: int
    first_step: float
    resumes_after: int | None
    """The last row before the attempt that is still part of the run: the row's step is below
    `first_step`, and no later attempt replaced the row. None for an attempt from scratch."""


class Unreadable(NamedTuple):
    """A path without a usable trace, and the reason."""

    path: str
    problem: str


@dataclass(frozen=True, eq=False)
class Trace:
    """The log of one run, in memory."""

    name: str
    """The path as the user gave it, with `#run` for one run of an export of several runs."""
    rows: Rows
    """All rows in the order of the files, including stale tails; at least one. Records of one
    step that log different signals are one row."""
    attempts: tuple[Attempt, ...]
    replaced: np.ndarray
    """bool (n,): rows that a later attempt replaced, because it began at their step or earlier."""
    problems: tuple[str, ...]
    """The lines, cells and records that could not be used, each with file and line."""
    notes: tuple[str, ...]
    """Remarks about usable content: a resume, a column that was not used."""
    files: int = 1
    """Number of files of the run."""

    @property
    def signals(self) -> frozenset[str]:
        """Signals that some row logs."""
        return frozenset(name for name, logged in self.rows.logged.items() if logged.any())

    @property
    def stale(self) -> int:
        """Number of rows that a later attempt replaced."""
        return int(np.count_nonzero(self.replaced))


def lineage(trace: Trace) -> Rows:
    """Returns the rows of the final run: without stale tails and repeated steps.

    If rows have the same step and signals, the last row remains.
    """
    rows = trace.rows.select(~trace.replaced)
    repeated = np.zeros(len(rows.step), bool)
    for logged in rows.logged.values():
        repeated[:-1] |= logged[1:] & logged[:-1]
    repeated[:-1] &= rows.step[1:] == rows.step[:-1]
    return rows.select(~repeated)


def join_logs(name: str, logs: Sequence[RawLog]) -> Trace:
    """Joins the files of a run in the order of writing.

    Raises TraceError after `_MAX_ATTEMPTS` restarts.
    """
    begins = np.cumsum([0, *map(_size, logs)]).tolist()
    step = np.arange(begins[-1], dtype=np.float64)
    signals = [signal for signal in SIGNALS if any(signal in log.logged for log in logs)]
    numbers = {signal: np.full(len(step), np.nan) for signal in signals}
    masks = {signal: np.zeros(len(step), bool) for signal in signals}
    for log, begin in zip(logs, begins, strict=False):
        part = slice(begin, begin + _size(log))
        step[part] = log.numbers.get(STEP, step[part])
        for signal, mask in log.logged.items():
            numbers[signal][part], masks[signal][part] = log.numbers[signal], mask
    row, first, starts = _merge(step, masks, begins)
    values = {signal: np.full(len(first), np.nan, np.float32) for signal in signals}
    logged = {signal: np.zeros(len(first), bool) for signal in signals}
    for signal, mask in masks.items():
        with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
            values[signal][row[mask]] = numbers[signal][mask]
        logged[signal][row[mask]] = True
    step = step[first]
    sources = [logs[bisect.bisect(begins, first[start]) - 1].path for start in starts]
    resumed, replaced = _find_resumed_rows(step, starts)
    attempts = [
        Attempt(number, source, start, float(step[start]), after)
        for number, (source, start, after) in enumerate(zip(sources, starts, resumed, strict=True))
    ]
    notes = [note for log in logs for note in log.notes]
    notes += [
        f"{each.source}: the run was resumed: attempt {each.number} begins at step "
        f"{each.first_step:.15g}"
        for each in attempts[1:]
    ]
    problems = [
        f"{log.path}, line {line}: {text}" if line else f"{log.path}: {text}"
        for log in logs
        for line, text in sorted(log.problems, key=operator.itemgetter(0))
    ]
    number = np.searchsorted(starts, np.arange(len(step)), side="right") - 1
    rows = Rows(step, number, values, logged)
    files = len({log.path for log in logs})
    return Trace(name, rows, tuple(attempts), replaced, tuple(problems), tuple(notes), files)


def _size(log: RawLog) -> int:
    return len(next(iter(log.logged.values())))


def _merge(
    step: np.ndarray, logged: Mapping[str, np.ndarray], begins: Container[int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Merges records of one attempt and step that log different signals.

    `begins` has the first record of each file.

    Returns:
        The row of each record, int (n,); the first record of each row; the first row of each
        attempt.
    """
    if (np.diff(step) > 0).all():
        return np.arange(len(step)), list(range(len(step))), [0]
    bits = np.zeros(len(step), np.int64)
    for name, mask in logged.items():
        bits |= mask.astype(np.int64) << SIGNALS.index(name)
    rows: list[int] = []
    first: list[int] = []
    starts = [0]
    signals: list[int] = []  # bits of each row
    row_at: dict[float, int] = {}  # step -> its last row in the attempt
    last: dict[int, float] = {}  # bit of a judged signal -> its last step in the attempt
    file_begins = False
    for record, (at, own) in enumerate(zip(step.tolist(), bits.tolist(), strict=True)):
        file_begins = file_begins or record in begins
        if judged := _JUDGED_BITS[own & 3]:
            reached = max(last.get(bit, -math.inf) for bit in judged)
            if at < reached or (file_begins and at == reached):
                starts.append(len(first))
                row_at, last = {}, {}
            file_begins = False
            last.update((bit, at) for bit in judged)
        row = row_at.get(at)
        if row is None or not own or own & signals[row]:
            row = row_at[at] = len(first)
            first.append(record)
            signals.append(own)
        signals[row] |= own
        rows.append(row)
    if len(starts) > _MAX_ATTEMPTS:
        raise TraceError(
            f"the steps decrease {len(starts) - 1:,} times. This looks like several runs or ranks "
            "in one file, or a file in reverse order. Write one file per run, with increasing steps"
        )
    return np.array(rows), first, starts


def _find_resumed_rows(step: np.ndarray, starts: list[int]) -> tuple[list[int | None], np.ndarray]:
    """Finds the row that each attempt resumes after, or None for an attempt from scratch.

    Returns the rows, and bool (n,): rows that a later attempt replaced.
    """
    # A row that is written late counts at the step that the run had reached.
    reached = np.concatenate(list(map(np.maximum.accumulate, np.split(step, starts[1:]))))
    replaced = np.zeros(len(step), bool)
    resumed: list[int | None] = [None]
    for start in starts[1:]:
        replaced[:start] |= reached[:start] >= step[start]
        remaining = np.flatnonzero(~replaced[:start])
        resumed.append(int(remaining[-1]) if remaining.size else None)
    return resumed, replaced
