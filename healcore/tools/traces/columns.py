"""Defines logs and traces: the recorded rows of a run as whole columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss")
"""Columns that are read from a log: signals of `healcore.core.signals`."""

STEP = "step"

JUDGED = ("loss", "grad_norm")
"""A row can be judged if it has one of these. Only these show where a run was resumed."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy."""


Problem = tuple[int, str]
"""Unusable content: its line from 1, or 0 in a format without lines, and a description."""


class Log(NamedTuple):
    """The rows of one file, or of one run in a file, as written."""

    path: str
    run: str | None
    """Name of the run in a file with several runs, or None."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal and "step", if the file has steps, which are finite."""
    logged: Mapping[str, np.ndarray]
    """As `Rows.logged`."""
    problems: list[Problem]
    notes: list[str]
    """Remarks about usable content, each with the path."""


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
