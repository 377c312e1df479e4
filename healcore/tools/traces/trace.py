"""What every trace reader hands over: the recorded rows of one run, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "lr")
"""What is looked for in a log, by the names of `healcore.core.signals` (and the learning rate)."""

JUDGED = frozenset({"loss", "grad_norm"})
"""A row needs one of these to be judged, and only these tell where a run was resumed."""

CHUNK = 4096
"""Most rows of one chunk: what is in memory at a time, whatever the length of the file."""


class TraceError(HealcoreError, ValueError):
    """A trace that cannot be read: the file, the rule, what to write instead."""


class Rows(NamedTuple):
    """One chunk: 1 to `CHUNK` rows of one attempt."""

    start: int
    """Index of its first row."""
    index: np.ndarray
    """int64 (n,), increasing. Counts the data rows of the trace from 0 for ever, over all its
    files. In a CSV file the lines that cannot be read count too, so that the index is the row
    number that pandas gives; elsewhere the rows of one step are merged before they are counted."""
    step: np.ndarray
    """float64 (n,) as recorded; the row's index where the file has no step. Goes up within an
    attempt, but for rows that were written late, such as an evaluation's, or twice."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) for each signal that the trace logs; NaN and Inf as recorded, NaN where the row
    does not log it."""
    given: Mapping[str, np.ndarray]
    """bool (n,), the same keys: this row logs the signal. An empty cell is not logged; the words
    nan and inf are values."""
    attempt: int
    """0, 1, ...: goes up where the recorded run was resumed from an earlier step."""


class Attempt(NamedTuple):
    """A stretch of the run between two (re)starts."""

    number: int
    source: str
    """The file in which it begins."""
    first_index: int
    first_step: float
    resumes_after: int | None
    """Index of the last row before it that is still part of the run: its step is smaller than
    `first_step` and no attempt in between replaced it. None: the attempt starts afresh."""


class Problem(NamedTuple):
    """Something that a reader has to tell, about a place in a file."""

    source: str
    line: int | None
    """Line number from 1, or None where the format has no lines."""
    problem: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.problem}"


class Survey(NamedTuple):
    """What a first pass over a trace has found."""

    rows: int
    """Rows that `Trace.rows` gives."""
    signals: frozenset[str]
    combinations: frozenset[frozenset[str]]
    """Every set of signals that some row logs together; the empty set where a row logs none."""
    attempts: tuple[Attempt, ...]
    first_step: float
    last_step: float
    """Step of the last row of the file, not the largest one."""
    problems: tuple[Problem, ...]
    """Damage (the first 100): lines, cells and records that could not be used."""
    problem_count: int
    notes: tuple[Problem, ...]
    """What is not damage but should be known (the first 100): a resume, a repeated step, a column
    that was not used."""
    note_count: int
    repeated: int
    """Rows that log a step once more which the row before has already logged."""
    stale: int
    """Rows that a later attempt replaced."""


class Table(NamedTuple):
    """A whole small trace; the fields of `Rows`, with the attempt of every row."""

    index: np.ndarray
    step: np.ndarray
    values: Mapping[str, np.ndarray]
    given: Mapping[str, np.ndarray]
    attempt: np.ndarray


class Unreadable(NamedTuple):
    """A path that gave no trace, and why."""

    path: str
    problem: str


class Trace:
    """The log of one run. Re-iterable; nothing but the current chunk is in memory."""

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        rows: Callable[[], Iterator[Rows]],
        survey: Callable[[], Survey],
    ) -> None:
        """See `open_traces`, which makes them.

        Args:
            name: the path as the user gave it, with `#run` for one run of an export of several.
            sources: the files, in the order of the lineage.
            rows: begins a pass over them.
            survey: makes the first pass.
        """
        self.name = name
        self.sources = tuple(sources)
        self._rows = rows
        self._make_survey = survey
        self._survey: Survey | None = None

    def __repr__(self) -> str:
        return f"Trace({self.name!r})"

    def rows(self) -> Iterator[Rows]:
        """All rows in the order of the files, stale tails included.

        Raises:
            TraceError: the file went away, or its steps go back again and again.
        """
        return self._rows()

    def survey(self) -> Survey:
        """What is in it: the first pass, made once.

        Raises:
            TraceError: as `rows`.
        """
        if self._survey is None:
            self._survey = self._make_survey()
        return self._survey


def load(trace: Trace) -> Table:
    """Everything at once, for small traces: about 40 bytes a row and signal."""
    chunks = list(trace.rows())
    names = trace.survey().signals | set().union(*(chunk.values for chunk in chunks))

    def column(kind: str, name: str, absent: float | bool, dtype: type) -> np.ndarray:
        parts = [
            getattr(chunk, kind).get(name, np.full(len(chunk.index), absent, dtype))
            for chunk in chunks
        ]
        return np.concatenate(parts) if parts else np.empty(0, dtype)

    return Table(
        index=np.concatenate([c.index for c in chunks]) if chunks else np.empty(0, np.int64),
        step=np.concatenate([c.step for c in chunks]) if chunks else np.empty(0),
        values={name: column("values", name, np.nan, np.float32) for name in sorted(names)},
        given={name: column("given", name, False, np.bool_) for name in sorted(names)},
        attempt=np.repeat(
            np.array([c.attempt for c in chunks], np.int64), [len(c.index) for c in chunks]
        ),
    )
