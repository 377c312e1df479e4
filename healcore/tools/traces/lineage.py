"""Surveys a trace in a first pass, and selects the rows that remain part of a resumed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from healcore.tools.traces.trace import (
    SIGNALS,
    Attempt,
    Findings,
    Rows,
    Survey,
    Trace,
    TraceFinding,
    by_signals,
    select_rows,
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
