"""Defines traces: the recorded rows of one run, in chunks.

`lineage` selects the rows that remain part of a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "lr")
"""Columns that are read from a log: signals of `healcore.core.signals` and the learning rate."""

JUDGED = frozenset({"loss", "grad_norm"})
"""A row can be judged if it has one of these. Only these show where a run was resumed."""

CHUNK = 4096
"""Largest number of rows in one chunk, which bounds the memory for files of any length."""

_MAX_KEPT = 100
"""Number of problems and of notes of a trace that are kept; all are counted."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy."""


class Rows(NamedTuple):
    """One chunk: 1 to `CHUNK` rows of one attempt.

    File readers use the same type before rows are merged, with the differences in `LogReader`.
    """

    index: np.ndarray
    """int64 (n,), increasing: the row number from 0, over all files of the trace. In a CSV file,
    unreadable lines count too, as in pandas. In other formats, merged rows are counted."""
    step: np.ndarray
    """float64 (n,): the recorded step, or the row's index in a file without steps. Increases within
    an attempt, except for repeated rows and rows that are written late (evaluations)."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) for each signal of the trace: NaN and Inf as recorded, NaN if not logged."""
    logged: Mapping[str, np.ndarray]
    """bool (n,), same keys: whether the row logs the signal. The texts nan and inf are values, an
    empty cell is not."""
    line: np.ndarray
    """int64 (n,): the first line of the row in the file, from 1; 0 in a format without lines."""
    source: str
    """Path of the file."""
    attempt: int = 0
    """Number from 0. Increases where the recorded run was resumed from an earlier step."""

    @property
    def start(self) -> int:
        """Index of the first row."""
        return int(self.index[0])


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
    """A problem or a note about a place in a file."""

    source: str
    line: int | None
    """Line number from 1, or None if the format has no lines."""
    text: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.text}"


class Findings:
    """Problems (damage) and notes (other remarks) of one pass over a trace, added to `earlier`."""

    def __init__(self, earlier: Findings | None = None) -> None:
        self.problems: list[TraceFinding] = list(earlier.problems) if earlier else []
        self.notes: list[TraceFinding] = list(earlier.notes) if earlier else []
        self.problem_count = earlier.problem_count if earlier else 0
        self.note_count = earlier.note_count if earlier else 0

    def problem(self, source: str, line: int | None, text: str) -> None:
        """Adds a problem: unusable content. Line 0 means that the format has no lines."""
        self.problem_count += 1
        if len(self.problems) < _MAX_KEPT:
            self.problems.append(TraceFinding(source, line or None, text))

    def note(self, source: str, line: int | None, text: str) -> None:
        """Adds a remark about usable content; `line` as for `problem`."""
        self.note_count += 1
        if len(self.notes) < _MAX_KEPT:
            self.notes.append(TraceFinding(source, line or None, text))


class Survey(NamedTuple):
    """The result of the first pass over a trace."""

    rows: int
    signals: frozenset[str]
    combinations: frozenset[frozenset[str]]
    """Every set of signals that a row logs together; the empty set for rows without signals."""
    attempts: tuple[Attempt, ...]
    first_step: float
    last_step: float
    """Step of the last row, which may be smaller than the largest step."""
    problems: tuple[TraceFinding, ...]
    """The first 100 lines, cells and records that could not be used."""
    problem_count: int
    notes: tuple[TraceFinding, ...]
    """The first 100 notes: a resume, a repeated step, a column that was not used."""
    note_count: int
    stale: int
    """Number of rows that a later attempt replaced."""


class Unreadable(NamedTuple):
    """A path without a usable trace, and the reason."""

    path: str
    problem: str


BeginPass = Callable[[Findings], Iterator[Rows]]
"""Begins a pass over the rows of a trace. Adds problems and notes to its argument."""


class Trace:
    """The log of one run. It can be read repeatedly, with only one chunk in memory.

    Attributes:
        name: the path as the user gave it, with `#run` for one run of an export of several runs.
        sources: the files, in the order in which they were written.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        begin: BeginPass,
        opening: Findings,
    ) -> None:
        self.name = name
        self.sources = tuple(sources)
        self._begin = begin
        self._opening = opening
        self._survey: Survey | None = None

    def __repr__(self) -> str:
        return f"Trace({self.name!r})"

    def rows(self) -> Iterator[Rows]:
        """Yields all rows in the order of the files, including stale tails.

        Raises TraceError if a file is missing, or its steps decrease too often.
        """
        return self._begin(Findings())

    def survey(self) -> Survey:
        """Returns the result of the first pass, which is cached. Raises as `rows`."""
        if self._survey is None:
            self._survey = _read_survey(self._begin, self._opening)
        return self._survey


def join_columns(
    parts: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int], absent: np.generic
) -> dict[str, np.ndarray]:
    """Joins columns by name; `absent` fills the rows of a part (of `lengths` rows) without it."""
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


def group_by_signals(
    logged: Mapping[str, np.ndarray], names: Sequence[str]
) -> Iterator[tuple[frozenset[str], np.ndarray]]:
    """Yields every set of signals that rows log together, and a mask of those rows, bool (n,).

    `logged` is bool (n,) by signal. Only the signals in `names` count.
    """
    names = [name for name in names if name in logged]
    bits = np.zeros(len(next(iter(logged.values()), ())), np.int64)
    for place, name in enumerate(names):
        bits |= logged[name].astype(np.int64) << place
    for code in np.unique(bits):
        yield frozenset(name for place, name in enumerate(names) if code >> place & 1), bits == code


def select_rows(rows: Rows, where: slice | np.ndarray) -> Rows:
    """Selects some rows of a chunk."""
    return rows._replace(
        index=rows.index[where],
        step=rows.step[where],
        values={name: column[where] for name, column in rows.values.items()},
        logged={name: column[where] for name, column in rows.logged.items()},
        line=rows.line[where],
    )


def lineage(trace: Trace) -> Iterator[Rows]:
    """Yields the rows of the final run: `trace.rows()` without stale tails and repeated steps.

    If rows have the same step and signals, the last row remains. Raises as `Trace.rows`.
    """
    first = np.array([attempt.first_step for attempt in trace.survey().attempts])
    last: Rows | None = None
    attempt, limit, max_step = -1, np.inf, -np.inf
    for rows in trace.rows():
        if rows.attempt != attempt:
            attempt, max_step = rows.attempt, -np.inf
            limit = first[attempt + 1 :].min(initial=np.inf)
        reached = np.maximum(max_step, np.maximum.accumulate(rows.step))
        max_step = reached[-1]
        keep = reached < limit
        keep[:-1] &= ~_replaced(rows)
        part = select_rows(rows, keep)
        if last is not None and (not len(part.index) or not _replaces(part, last)):
            yield last
            last = None
        if len(part.index):
            # The last row waits: the next chunk may log its step again.
            if len(part.index) > 1:
                yield select_rows(part, slice(0, -1))
            last = select_rows(part, slice(-1, None))
    if last is not None:
        yield last


def _replaced(rows: Rows) -> np.ndarray:
    """Whether the next row logs the same step and a signal of this row, bool (n - 1,)."""
    same = rows.step[1:] == rows.step[:-1]
    shared = np.zeros(len(same), bool)
    for logged in rows.logged.values():
        shared |= logged[1:] & logged[:-1]
    return same & shared


def _replaces(rows: Rows, earlier: Rows) -> bool:
    return rows.step[0] == earlier.step[0] and any(
        logged[0] and name in earlier.logged and earlier.logged[name][0]
        for name, logged in rows.logged.items()
    )


def _read_survey(begin: BeginPass, opening: Findings) -> Survey:
    """Reads all rows once, and a second time if the run was resumed."""
    findings = Findings(opening)
    count = 0
    combinations: set[frozenset[str]] = set()
    attempts: list[Attempt] = []
    first_step = last_step = np.nan
    for rows in begin(findings):
        if not count:
            first_step = float(rows.step[0])
        if not attempts or rows.attempt != attempts[-1].number:
            first = float(rows.step[0])
            attempts.append(Attempt(rows.attempt, rows.source, rows.start, first, None))
        count += len(rows.index)
        last_step = float(rows.step[-1])
        combinations |= {logged for logged, _ in group_by_signals(rows.logged, SIGNALS)}
    stale = 0
    if len(attempts) > 1:
        attempts, stale = _with_ancestors(begin, attempts)
        _note_fresh_files(attempts, findings)
    return Survey(
        rows=count,
        signals=frozenset().union(*combinations),
        combinations=frozenset(combinations),
        attempts=tuple(attempts),
        first_step=first_step,
        last_step=last_step,
        problems=_in_order(findings.problems),
        problem_count=findings.problem_count,
        notes=_in_order(findings.notes),
        note_count=findings.note_count,
        stale=stale,
    )


def _note_fresh_files(attempts: Sequence[Attempt], findings: Findings) -> None:
    files = {attempts[0].source}
    for attempt in attempts:
        if attempt.source not in files and attempt.resumes_after is None:
            findings.note(
                attempt.source,
                None,
                f"it begins at step {attempt.first_step:.15g}, before all rows that were read so "
                "far: the run was restarted. If these are several runs, name the files",
            )
        files.add(attempt.source)


def _in_order(findings: Sequence[TraceFinding]) -> tuple[TraceFinding, ...]:
    """Sorts findings by line within each file, because a chunk is read column by column."""
    files = list(dict.fromkeys(finding.source for finding in findings))
    return tuple(sorted(findings, key=lambda each: (files.index(each.source), each.line or 0)))


def _with_ancestors(begin: BeginPass, attempts: Sequence[Attempt]) -> tuple[list[Attempt], int]:
    """Sets the row that each attempt resumes after, and counts the stale rows.

    A row of attempt a with step t is part of attempt k > a if and only if t is below the first step
    of every attempt b with a < b <= k. These first steps are known only after the first pass. To
    keep all steps of the first pass would take 16 bytes per row, too much for 100 million rows.
    """
    first = np.array([attempt.first_step for attempt in attempts])
    resumed = list(attempts)
    stale, number, limits, max_step = 0, -1, first[:0], -np.inf
    for rows in begin(Findings()):
        if rows.attempt != number:
            number, max_step = rows.attempt, -np.inf
            limits = np.minimum.accumulate(first[number + 1 :])
        if not len(limits):
            continue
        # A row that is written late counts at the step that the run had reached.
        reached = np.maximum(max_step, np.maximum.accumulate(rows.step))
        max_step = reached[-1]
        before = np.searchsorted(reached, limits)
        for place in np.flatnonzero(before).tolist():
            later, row = number + 1 + place, int(rows.index[before[place] - 1])
            resumed[later] = resumed[later]._replace(resumes_after=row)
        stale += len(reached) - int(before[-1])
    return resumed, stale
