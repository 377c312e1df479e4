"""Defines the common form of all trace readers: the recorded rows of one run, in chunks.

`survey` reads a trace once, and `lineage` selects the rows that remain part of a resumed run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss", "lr")
"""Signals that are read from a log, as in `healcore.core.signals`, and the learning rate."""

JUDGED = frozenset({"loss", "grad_norm"})
"""A row needs one of these to be judged, and only these show where a run was resumed."""

CHUNK = 4096
"""Most rows of one chunk, which limits the memory for files of any length."""

_KEPT = 100
"""Findings of a trace that are kept; all are counted."""


class TraceError(HealcoreError, ValueError):
    """A trace that cannot be read; the message has the file, the rule and the remedy."""


class Rows(NamedTuple):
    """One chunk: 1 to `CHUNK` rows of one attempt.

    The readers of files make the same type; `LogReader` says what differs there.
    """

    index: np.ndarray
    """int64 (n,), increasing: the row in the trace from 0, over all its files. In a CSV file
    unreadable lines count too, as in pandas; in other formats rows of one step are merged before
    they are counted."""
    step: np.ndarray
    """float64 (n,) as recorded; the row's index if the file has no step. Increases within an
    attempt, except for rows that were written late (an evaluation's) or twice."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) for each signal of the trace; NaN and Inf as recorded, NaN if not given."""
    given: Mapping[str, np.ndarray]
    """bool (n,), same keys: logged in this row. An empty cell is not; the texts nan and inf are."""
    line: np.ndarray
    """int64 (n,): the line of the file that the row begins in, from 1; 0 if it has no lines."""
    source: str
    """The file."""
    attempt: int = 0
    """Counts from 0, and increases where the recorded run was resumed from an earlier step."""

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
    `first_step` and no attempt in between replaced it. None for an attempt from scratch."""


class TraceFinding(NamedTuple):
    """Damage, or another remark, at a place in a file."""

    source: str
    line: int | None
    """Counts from 1; None if the format has no lines."""
    text: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}, line {self.line}"
        return f"{place}: {self.text}"


class Findings:
    """Problems (damage) and notes (no damage) of one pass over a trace, added to `earlier`."""

    def __init__(self, earlier: Findings | None = None) -> None:
        self.problems: list[TraceFinding] = list(earlier.problems) if earlier else []
        self.notes: list[TraceFinding] = list(earlier.notes) if earlier else []
        self.problem_count = earlier.problem_count if earlier else 0
        self.note_count = earlier.note_count if earlier else 0

    def problem(self, source: str, line: int | None, text: str) -> None:
        """Adds something that could not be used; line 0 means that the format has no lines."""
        self.problem_count += 1
        if len(self.problems) < _KEPT:
            self.problems.append(TraceFinding(source, line or None, text))

    def note(self, source: str, line: int | None, text: str) -> None:
        """Adds a remark about something that was used; `line` as for `problem`."""
        self.note_count += 1
        if len(self.notes) < _KEPT:
            self.notes.append(TraceFinding(source, line or None, text))


class Survey(NamedTuple):
    """The result of a first pass over a trace."""

    rows: int
    signals: frozenset[str]
    combinations: frozenset[frozenset[str]]
    """Every set of signals that some row logs together; the empty set if a row logs none."""
    attempts: tuple[Attempt, ...]
    first_step: float
    last_step: float
    """Step of the last row of the file, not the largest one."""
    problems: tuple[TraceFinding, ...]
    """The first 100 lines, cells and records that could not be used."""
    problem_count: int
    notes: tuple[TraceFinding, ...]
    """The first 100 remarks: a resume, a repeated step, a column that was not used."""
    note_count: int
    stale: int
    """Rows that a later attempt replaced."""


class Unreadable(NamedTuple):
    """A path that gave no trace, and why."""

    path: str
    problem: str


class Trace:
    """The log of one run. It can be read repeatedly, with only one chunk in memory.

    `name` is the path as the user gave it, with `#run` for one run of an export of several.
    `sources` are the files, in the order in which they were written.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[str],
        begin: Callable[[Findings], Iterator[Rows]],
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
        """All rows in the order of the files, including stale tails.

        Raises TraceError if the file has gone, or its steps go back again and again.
        """
        return self._begin(Findings())

    def survey(self) -> Survey:
        """The result of the first pass, which is made once; raises as `rows`."""
        if self._survey is None:
            self._survey = survey(self._begin, self._opening)
        return self._survey


def join_columns(
    parts: Sequence[Mapping[str, np.ndarray]], lengths: Sequence[int], absent: np.generic
) -> dict[str, np.ndarray]:
    """Joins columns by name; `absent` fills in for a part (of `lengths` rows) that lacks one."""
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


def by_signals(
    given: Mapping[str, np.ndarray], names: Sequence[str]
) -> Iterator[tuple[frozenset[str], np.ndarray]]:
    """Every set of signals that rows log together, with those rows, bool (n,).

    `given` is bool (n,) by signal. Only the signals in `names` count.
    """
    names = [name for name in names if name in given]
    bits = np.zeros(len(next(iter(given.values()), ())), np.int64)
    for place, name in enumerate(names):
        bits |= given[name].astype(np.int64) << place
    for code in np.unique(bits):
        yield frozenset(n for place, n in enumerate(names) if code >> place & 1), bits == code


def select_rows(rows: Rows, where: slice | np.ndarray) -> Rows:
    """Selects some rows of a chunk."""
    return rows._replace(
        index=rows.index[where],
        step=rows.step[where],
        values={name: column[where] for name, column in rows.values.items()},
        given={name: column[where] for name, column in rows.given.items()},
        line=rows.line[where],
    )


MergedPass = Callable[[Findings], Iterator[Rows]]
"""Begins a pass over the rows of a trace."""


def lineage(trace: Trace) -> Iterator[Rows]:
    """The run as it finally went: `trace.rows()` without stale tails and repeated steps.

    Of rows with the same step and signals the last one stays. Raises as `Trace.rows`.
    """
    first = np.array([attempt.first_step for attempt in trace.survey().attempts])
    last: Rows | None = None
    attempt, limit, top = -1, np.inf, -np.inf
    for rows in trace.rows():
        if rows.attempt != attempt:
            attempt, top = rows.attempt, -np.inf
            limit = first[attempt + 1 :].min(initial=np.inf)
        reached = np.maximum(top, np.maximum.accumulate(rows.step))
        top = reached[-1]
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
    """Flags (n - 1,): the next row logs the same step and a signal of this row."""
    same = rows.step[1:] == rows.step[:-1]
    shared = np.zeros(len(same), bool)
    for given in rows.given.values():
        shared |= given[1:] & given[:-1]
    return same & shared


def _replaces(rows: Rows, earlier: Rows) -> bool:
    return rows.step[0] == earlier.step[0] and any(
        given[0] and name in earlier.given and earlier.given[name][0]
        for name, given in rows.given.items()
    )


def survey(begin: MergedPass, opening: Findings) -> Survey:
    """Reads everything once, and a second time if the run was resumed; raises as `Trace.rows`."""
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
        combinations |= {logged for logged, _ in by_signals(rows.given, SIGNALS)}
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
                f"it begins at step {attempt.first_step:.15g}, before everything that was read so "
                "far: the run was started again. If these are several runs, name the files",
            )
        files.add(attempt.source)


def _in_order(findings: Sequence[TraceFinding]) -> tuple[TraceFinding, ...]:
    """Sorts by line within each file, since a chunk is read column by column."""
    files = {each.source: place for place, each in reversed(list(enumerate(findings)))}
    return tuple(sorted(findings, key=lambda each: (files[each.source], each.line or 0)))


def _with_ancestors(begin: MergedPass, attempts: Sequence[Attempt]) -> tuple[list[Attempt], int]:
    """Sets the last row that each attempt continues from, and counts the stale rows.

    A row of attempt a with step t is part of attempt k > a exactly if t is below the first step of
    every attempt b with a < b <= k. Those first steps are known only after the first pass. Keeping
    every step of it would take 16 bytes a row, too much for a hundred million rows.
    """
    first = np.array([attempt.first_step for attempt in attempts])
    found = list(attempts)
    stale, number, limits, top = 0, -1, first[:0], -np.inf
    for rows in begin(Findings()):
        if rows.attempt != number:
            number, top = rows.attempt, -np.inf
            limits = np.minimum.accumulate(first[number + 1 :])
        if not len(limits):
            continue
        # A row that is written late (see `merged_rows`) counts at the step the run had reached.
        reached = np.maximum(top, np.maximum.accumulate(rows.step))
        top = reached[-1]
        before = np.searchsorted(reached, limits)
        for place in np.flatnonzero(before).tolist():
            later, row = number + 1 + place, int(rows.index[before[place] - 1])
            found[later] = found[later]._replace(resumes_after=row)
        stale += len(reached) - int(before[-1])
    return found, stale
