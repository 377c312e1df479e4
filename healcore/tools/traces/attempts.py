"""Joins the files of a run: merges rows of one step, and numbers the attempts.

Steps increase within an attempt. A new attempt begins where a file begins at or before the last
step, or where the step decreases within a file: the run was resumed, and the earlier rows from that
step on are stale. Only the steps of the loss and of the gradient norm count, separately, because an
evaluation that is written late is no resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.columns import (
    JUDGED,
    STEP,
    Attempt,
    Findings,
    Rows,
    Trace,
    TraceError,
)

_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""


class Log(NamedTuple):
    """The rows of one file, or of one run in a file, before they are merged."""

    path: str
    run: str | None
    """Name of the run in a file with several runs, or None."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal and "step", if the file has steps, which are finite."""
    logged: Mapping[str, np.ndarray]
    """As `Rows.logged`."""
    line: np.ndarray
    """int64 (n,): line of each row in the file, from 1; 0 in a format without lines."""
    findings: Findings
    index: np.ndarray | None = None
    """int64 (n,): row numbers in the file, or None if rows are numbered after they are merged."""
    count: int = 0
    """Number of rows of the file, including skipped rows, if `index` is not None."""


def join_logs(name: str, logs: Sequence[Log]) -> Trace:
    """Joins the files of a run in the order of writing.

    Raises TraceError after `_MAX_ATTEMPTS` restarts.
    """
    names = sorted({name for log in logs for name in log.logged})
    joiner = _Joiner(names)
    parts = [joiner.rows_of(log) for log in logs]
    rows = Rows(
        np.concatenate([part.index for part in parts]),
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.attempt for part in parts]),
        {name: np.concatenate([part.values[name] for part in parts]) for name in names},
        {name: np.concatenate([part.logged[name] for part in parts]) for name in names},
    )
    ends = np.cumsum([len(part.index) for part in parts])
    first = np.flatnonzero(np.diff(rows.attempt, prepend=-1))
    attempts = tuple(
        Attempt(
            number=number,
            source=logs[int(np.searchsorted(ends, at, side="right"))].path,
            first_index=int(rows.index[at]),
            first_step=float(rows.step[at]),
            resumes_after=None,
        )
        for number, at in enumerate(first.tolist())
    )
    attempts, replaced = _with_ancestors(rows, attempts)
    return Trace(
        name=name,
        rows=rows,
        attempts=attempts,
        replaced=replaced,
        problems=tuple(problem for log in logs for problem in log.findings.problems),
        problem_count=sum(log.findings.problem_count for log in logs),
        notes=tuple(f"{log.path}: {note}" for log in logs for note in log.findings.notes),
        files=len({log.path for log in logs}),
    )


class _Joiner:
    """Knows the next index, the attempt and each signal's last step, from file to file."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names  # of the signals in all files
        self._next = 0  # index of the next row
        self._attempt = 0
        self._last_steps: dict[str, float] = {}  # in the current attempt

    def rows_of(self, log: Log) -> Rows:
        """Merges the rows of the next file."""
        base, count = self._next, len(log.line)
        index = None if log.index is None else log.index + base
        step = log.numbers.get(STEP)
        if step is None:
            index = np.arange(base, base + count) if index is None else index
            step = index.astype(np.float64)
        attempt = self._number_attempts(log, step)
        row, first = _merge(step, attempt, log.logged)
        merged = len(first)
        if index is None:
            numbers = np.arange(base, base + merged)
        else:
            numbers = index[first]
            if "loss" in log.logged and merged < count:
                # A merged row of a table has the number of its row with the loss.
                with_loss = numbers.copy()
                with_loss[row[log.logged["loss"]]] = index[log.logged["loss"]]
                numbers = with_loss if (np.diff(with_loss) > 0).all() else numbers
        self._next = base + (merged if log.index is None else log.count)
        values = {name: np.full(merged, np.nan, np.float32) for name in self._names}
        logged = {name: np.zeros(merged, bool) for name in self._names}
        for name, mask in log.logged.items():
            with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
                values[name][row[mask]] = log.numbers[name][mask]
            logged[name][row[mask]] = True
        return Rows(numbers, step[first], attempt[first], values, logged)

    def _number_attempts(self, log: Log, step: np.ndarray) -> np.ndarray:
        """Returns the attempt of each row, int64 (n,)."""
        judged = {name: np.flatnonzero(log.logged[name]) for name in JUDGED if name in log.logged}
        first = min((rows[0] for rows in judged.values() if len(rows)), default=-1)
        # Of each row that logs a signal: the row before it with the signal, -1 in an earlier file.
        earlier = {name: np.concatenate(([-1], rows))[: len(rows)] for name, rows in judged.items()}
        before = {
            name: np.concatenate(([self._last_steps.get(name, -np.inf)], step[rows]))[: len(rows)]
            for name, rows in judged.items()
        }
        decreases = [
            (int(rows[at]), int(earlier[name][at]))
            for name, rows in judged.items()
            for at in np.flatnonzero(
                (step[rows] < before[name]) | ((rows == first) & (step[rows] == before[name]))
            )
        ]
        starts = [-1]
        for row, previous in sorted(decreases):
            if previous >= starts[-1]:
                self._restart(log, row, step[row])
                starts.append(row)
        attempt = np.searchsorted(starts[1:], np.arange(len(step)), side="right")
        for name, rows in judged.items():
            if len(rows) and rows[-1] >= starts[-1]:
                self._last_steps[name] = float(step[rows[-1]])
        return attempt + self._attempt - (len(starts) - 1)

    def _restart(self, log: Log, row: int, step: float) -> None:
        """Begins an attempt at a row."""
        self._attempt += 1
        if self._attempt >= _MAX_ATTEMPTS:
            raise TraceError(
                f"{log.path}, line {log.line[row]}: the steps decrease for the {_MAX_ATTEMPTS:,}th "
                "time. This looks like several runs or ranks in one file, or a file in reverse "
                "order. Write one file per run, with increasing steps"
            )
        note = f"the run was resumed: attempt {self._attempt} begins at step {step:.15g}"
        log.findings.notes.append(note)
        self._last_steps.clear()


def _merge(
    step: np.ndarray, attempt: np.ndarray, logged: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Merges rows of one attempt and step that log different signals.

    Returns the merged row of each row, int (n,), and the first row of each merged row, int (m,).
    """
    count = len(step)
    order = np.lexsort((step, attempt))
    same = (np.diff(step[order]) == 0) & (np.diff(attempt[order]) == 0)
    if not same.any():
        return np.arange(count), np.arange(count)
    bits = np.zeros(count, np.int64)
    for place, mask in enumerate(logged.values()):
        bits |= mask.astype(np.int64) << place
    head, taken = 0, 0
    heads = np.empty(count, np.int64)
    for row, joins, own in zip(
        order.tolist(), [False, *same.tolist()], bits[order].tolist(), strict=True
    ):
        if joins and own and not own & taken:
            taken |= own
        else:
            head, taken = row, own
        heads[row] = head
    first, row_of = np.unique(heads, return_inverse=True)
    return row_of, first


def _with_ancestors(
    rows: Rows, attempts: tuple[Attempt, ...]
) -> tuple[tuple[Attempt, ...], np.ndarray]:
    """Sets the row that each attempt resumes after.

    Returns the attempts, and bool (n,): rows that a later attempt replaced.
    """
    starts = np.searchsorted(rows.attempt, np.arange(len(attempts))).tolist()
    # A row that is written late counts at the step that the run had reached.
    reached = np.concatenate(list(map(np.maximum.accumulate, np.split(rows.step, starts[1:]))))
    replaced = np.zeros(len(reached), bool)
    resumed = list(attempts)
    for number, start in enumerate(starts[1:], 1):
        replaced[:start] |= reached[:start] >= attempts[number].first_step
        remaining = np.flatnonzero(~replaced[:start])
        if remaining.size:
            row = int(rows.index[remaining[-1]])
            resumed[number] = resumed[number]._replace(resumes_after=row)
    return tuple(resumed), replaced
