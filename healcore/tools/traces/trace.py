"""What every trace reader hands over: the recorded rows of one run, in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "lr")
"""What is looked for in a log, by the names of `healcore.core.signals` (and the learning rate)."""

JUDGED = frozenset({"loss", "grad_norm"})
"""A row needs one of these to be judged, and only these show where a run was resumed."""

CHUNK = 4096
"""Most rows of one chunk. This bounds the memory, whatever the length of the file."""

_KEPT = 100
"""Findings of a trace that are kept; all are counted."""


class TraceError(HealcoreError, ValueError):
    """A trace that cannot be read: the file, the rule, what to write instead."""


class Rows(NamedTuple):
    """One chunk: 1 to `CHUNK` rows of one attempt."""

    index: np.ndarray
    """int64 (n,), increasing. Counts the data rows of the trace from 0, over all its files. In a
    CSV file the lines that cannot be read count too, so that the index is the row number that
    pandas gives; elsewhere the rows of one step are merged before they are counted."""
    step: np.ndarray
    """float64 (n,) as recorded; the row's index where the file has no step. Goes up within an
    attempt, except for rows that were written late (an evaluation's) or twice."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) for each signal that the trace logs; NaN and Inf as recorded, NaN where the row
    does not log it."""
    given: Mapping[str, np.ndarray]
    """bool (n,), the same keys: this row logs the signal. An empty cell is not logged; the texts
    nan and inf are values."""
    attempt: int
    """0, 1, ...: goes up where the recorded run was resumed from an earlier step."""

    @property
    def start(self) -> int:
        """Index of the first row."""
        return int(self.index[0])


class Attempt(NamedTuple):
    """The part of a run between two (re)starts."""

    number: int
    source: str
    """The file in which it begins."""
    first_index: int
    first_step: float
    resumes_after: int | None
    """Index of the last row before it that is still part of the run: its step is smaller than
    `first_step` and no attempt in between replaced it. None: the attempt starts afresh."""


class TraceFinding(NamedTuple):
    """Damage, or something else worth knowing, at a place in a file."""

    source: str
    line: int | None
    """Line number from 1, or None where the format has no lines."""
    text: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.text}"


class Findings:
    """Problems (damage) and notes (no damage) of one pass over a trace.

    Args:
        earlier: findings to begin with.
    """

    def __init__(self, earlier: Findings | None = None) -> None:
        self.problems: list[TraceFinding] = list(earlier.problems) if earlier else []
        self.notes: list[TraceFinding] = list(earlier.notes) if earlier else []
        self.problem_count = earlier.problem_count if earlier else 0
        self.note_count = earlier.note_count if earlier else 0

    def problem(self, source: str, line: int | None, text: str) -> None:
        """Adds something that could not be used. A line of 0 is none."""
        self.problem_count += 1
        if len(self.problems) < _KEPT:
            self.problems.append(TraceFinding(source, line or None, text))

    def note(self, source: str, line: int | None, text: str) -> None:
        """Adds something that was used, and should be known. A line of 0 is none."""
        self.note_count += 1
        if len(self.notes) < _KEPT:
            self.notes.append(TraceFinding(source, line or None, text))


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
    problems: tuple[TraceFinding, ...]
    """Damage (the first 100): lines, cells and records that could not be used."""
    problem_count: int
    notes: tuple[TraceFinding, ...]
    """What is not damage but should be known (the first 100): a resume, a repeated step, a column
    that was not used."""
    note_count: int
    repeated: int
    """Rows that log a signal of a step which an earlier row has already logged."""
    stale: int
    """Rows that a later attempt replaced."""


class Unreadable(NamedTuple):
    """A path that gave no trace, and why."""

    path: str
    problem: str


class Trace:
    """The log of one run. Re-iterable; nothing but the current chunk is in memory.

    Args:
        name: the path as the user gave it, with `#run` for one run of an export of several.
        sources: the files, in the order in which they were written.
        rows: begins a pass over them.
        survey: makes the first pass.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        rows: Callable[[], Iterator[Rows]],
        survey: Callable[[], Survey],
    ) -> None:
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
            TraceError: the file has gone, or its steps go back again and again.
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


class LoadedTrace(NamedTuple):
    """A whole small trace; the fields of `Rows`, with the attempt of every row."""

    index: np.ndarray
    step: np.ndarray
    values: Mapping[str, np.ndarray]
    given: Mapping[str, np.ndarray]
    attempt: np.ndarray


def load(trace: Trace) -> LoadedTrace:
    """Everything at once, for small traces: about 40 bytes a row and signal."""
    chunks = list(trace.rows())
    if not chunks:
        empty = np.empty(0, np.int64)
        return LoadedTrace(empty, np.empty(0), {}, {}, empty)
    lengths = [len(chunk.index) for chunk in chunks]
    return LoadedTrace(
        index=np.concatenate([chunk.index for chunk in chunks]),
        step=np.concatenate([chunk.step for chunk in chunks]),
        values=join_columns([chunk.values for chunk in chunks], lengths, np.float32(np.nan)),
        given=join_columns([chunk.given for chunk in chunks], lengths, np.False_),
        attempt=np.repeat([chunk.attempt for chunk in chunks], lengths),
    )


def join_columns(
    parts: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int], absent: np.generic
) -> dict[str, np.ndarray]:
    """Columns one below the other.

    Args:
        parts: name -> column.
        lengths: of each part.
        absent: where a part does not have the column.
    """
    names = sorted(set().union(*parts))
    return {
        name: np.concatenate(
            [
                part[name] if name in part else np.full(length, absent)
                for part, length in zip(parts, lengths, strict=True)
            ]
        )
        for name in names
    }


_Chunk = TypeVar("_Chunk", bound=tuple)


def select_rows(chunk: _Chunk, where: slice | np.ndarray) -> _Chunk:
    """Some rows of a chunk: every array of a named tuple, and those in its mappings, are cut."""

    def cut(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return value[where]
        if isinstance(value, Mapping):
            return {name: column[where] for name, column in value.items()}
        return value

    return type(chunk)(*map(cut, chunk))
