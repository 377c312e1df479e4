"""Defines traces: the recorded rows of one run as whole columns.

`lineage` selects the rows that remain part of a resumed run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "lr")
"""Columns that are read from a log: signals of `healcore.core.signals` and the learning rate."""

JUDGED = ("loss", "grad_norm")
"""A row can be judged if it has one of these. Only these show where a run was resumed."""

_MAX_KEPT = 100
"""Number of problems of a file that are kept; all are counted."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy."""


class Rows(NamedTuple):
    """Rows of a trace. Every array is (n,)."""

    index: np.ndarray
    """int64, increasing: the row number from 0, over all files of the trace. In a CSV file,
    unreadable lines count too, as in pandas. In other formats, merged rows are counted."""
    step: np.ndarray
    """float64: the recorded step, or the row's index in a file without steps. Increases within
    an attempt, except for repeated rows and rows that are written late (evaluations)."""
    attempt: np.ndarray
    """int64, from 0. Increases where the recorded run was resumed from an earlier step."""
    values: Mapping[str, np.ndarray]
    """float32 for each signal of the trace: NaN and Inf as recorded, NaN if not logged."""
    logged: Mapping[str, np.ndarray]
    """bool, same keys: whether the row logs the signal. The texts nan and inf are values, an
    empty cell is not."""

    def select(self, where: slice | np.ndarray) -> Rows:
        """Selects some rows."""
        return Rows(
            self.index[where],
            self.step[where],
            self.attempt[where],
            {name: column[where] for name, column in self.values.items()},
            {name: column[where] for name, column in self.logged.items()},
        )


class Attempt(NamedTuple):
    """The part of a run from one start or resume to the next."""

    number: int
    source: str
    """Path of the file in which the attempt begins."""
    first_index: int
    first_step: float
    resumes_after: int | None
    """Index of the last row before the attempt that is still part of the run: the row's step is
    below `first_step`, and no later attempt replaced the row. None for an attempt from scratch."""


class TraceFinding(NamedTuple):
    """A problem at a place in a file."""

    source: str
    line: int | None
    """Line number from 1, or None if the format has no lines."""
    text: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.text}"


class Findings:
    """Problems (unusable content) and notes (other remarks) of one file."""

    def __init__(self) -> None:
        self.problems: list[TraceFinding] = []
        """The first 100."""
        self.problem_count = 0
        self.notes: list[str] = []

    def problem(self, source: str, line: int | None, text: str) -> None:
        """Adds a problem. Line 0 means that the format has no lines."""
        self.problem_count += 1
        if len(self.problems) < _MAX_KEPT:
            self.problems.append(TraceFinding(source, line or None, text))


class Unreadable(NamedTuple):
    """A path without a usable trace, and the reason."""

    path: str
    problem: str


@dataclass(frozen=True, eq=False)
class Trace:
    """The log of one run, in memory."""

    name: str
    """The path as the user gave it, with `#run` for one run of an export of several runs."""
    sources: tuple[str, ...]
    """The files, in the order in which they were written."""
    rows: Rows
    """All rows in the order of the files, including stale tails; at least one."""
    attempts: tuple[Attempt, ...]
    stale: int
    """Number of rows that a later attempt replaced."""
    problems: tuple[TraceFinding, ...]
    """The first lines, cells and records of each file that could not be used, at most 100."""
    problem_count: int
    notes: tuple[str, ...]
    """Remarks about usable content: a resume, a column that was not used."""

    @property
    def signals(self) -> frozenset[str]:
        """Signals that some row logs."""
        return frozenset(name for name, logged in self.rows.logged.items() if logged.any())


def lineage(trace: Trace) -> Rows:
    """Returns the rows of the final run: without stale tails and repeated steps.

    If rows have the same step and signals, the last row remains.
    """
    rows = trace.rows.select(~stale_rows(trace.rows, trace.attempts))
    repeated = np.zeros(len(rows.step), bool)
    for logged in rows.logged.values():
        repeated[:-1] |= logged[1:] & logged[:-1]
    repeated[:-1] &= rows.step[1:] == rows.step[:-1]
    return rows.select(~repeated)


def stale_rows(rows: Rows, attempts: tuple[Attempt, ...]) -> np.ndarray:
    """Returns bool (n,): rows that a later attempt replaced, because it began at their step."""
    stale = np.zeros(len(rows.step), bool)
    limit = np.inf  # the smallest first step of a later attempt
    for attempt in reversed(attempts):
        part = slice(*np.searchsorted(rows.attempt, (attempt.number, attempt.number + 1)))
        # A row that is written late counts at the step that the run had reached.
        stale[part] = np.maximum.accumulate(rows.step[part]) >= limit
        limit = min(limit, attempt.first_step)
    return stale
