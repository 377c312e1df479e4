"""Defines traces: the recorded rows of one run as whole columns.

`lineage` selects the rows that remain part of a resumed run.
"""

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


class Findings:
    """Problems (unusable content) and notes (other remarks) of one file."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        """The first 100, each with file and line."""
        self.problem_count = 0
        self.notes: list[str] = []

    def problem(self, source: str, line: int, text: str) -> None:
        """Adds a problem. The line is 0 in a format without lines."""
        self.problem_count += 1
        if len(self.problems) < _MAX_KEPT:
            self.problems.append(f"{source}, line {line}: {text}" if line else f"{source}: {text}")


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
    """All rows in the order of the files, including stale tails; at least one."""
    attempts: tuple[Attempt, ...]
    replaced: np.ndarray
    """bool (n,): rows that a later attempt replaced, because it began at their step or earlier."""
    problems: tuple[str, ...]
    """The first lines, cells and records of each file that could not be used, at most 100."""
    problem_count: int
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
