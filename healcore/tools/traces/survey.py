"""The first pass over a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress

import numpy as np

from healcore.tools.traces.findings import Findings
from healcore.tools.traces.lineage import Ancestors
from healcore.tools.traces.trace import SIGNALS, Attempt, Problem, Survey
from healcore.tools.traces.weave import Woven


def survey(woven: Callable[[Findings], Iterator[Woven]], opening: Findings) -> Survey:
    """Reads everything once, and once more where the run was resumed.

    Args:
        woven: begins a pass over the trace.
        opening: what opening the files had to tell.

    Raises:
        TraceError: see `Trace.rows`.
    """
    findings = opening.copy()
    count = repeated = 0
    signals: set[str] = set()
    combinations: set[frozenset[str]] = set()
    attempts: list[Attempt] = []
    first_step = last_step = np.nan
    for rows, source, repeats in woven(findings):
        if not count:
            first_step = float(rows.step[0])
        if not attempts or rows.attempt != attempts[-1].number:
            start = Attempt(rows.attempt, source, rows.start, float(rows.step[0]), None)
            attempts.append(start)
        count += len(rows.index)
        repeated += repeats
        last_step = float(rows.step[-1])
        names = [name for name in SIGNALS if name in rows.given]
        # Eight kinds of rows at most occur in practice: their bits are found once per chunk.
        bits = np.zeros(len(rows.index), np.int64)
        for place, name in enumerate(names):
            bits |= rows.given[name].astype(np.int64) << place
        for kind in np.unique(bits):
            logged = compress(names, (kind >> place & 1 for place in range(len(names))))
            combinations.add(frozenset(logged))
    signals.update(*combinations)
    stale = 0
    if len(attempts) > 1:
        attempts, stale = _with_ancestors(woven, attempts)
        _tell_fresh_files(attempts, findings)
    return Survey(
        rows=count,
        signals=frozenset(signals),
        combinations=frozenset(combinations),
        attempts=tuple(attempts),
        first_step=first_step,
        last_step=last_step,
        problems=_in_order(findings.problems),
        problem_count=findings.problem_count,
        notes=_in_order(findings.notes),
        note_count=findings.note_count,
        repeated=repeated,
        stale=stale,
    )


def _tell_fresh_files(attempts: Sequence[Attempt], findings: Findings) -> None:
    files = {attempts[0].source}
    for attempt in attempts:
        if attempt.source not in files and attempt.resumes_after is None:
            findings.note(
                attempt.source,
                None,
                f"it begins at step {attempt.first_step:.15g}, before everything that was read so "
                "far: the run was started anew. If these are several runs, name the files",
            )
        files.add(attempt.source)


def _in_order(told: Sequence[Problem]) -> tuple[Problem, ...]:
    """By line within each file: a chunk is read column by column."""
    files = {problem.source: place for place, problem in reversed(list(enumerate(told)))}
    return tuple(sorted(told, key=lambda problem: (files[problem.source], problem.line or 0)))


def _with_ancestors(
    woven: Callable[[Findings], Iterator[Woven]], attempts: Sequence[Attempt]
) -> tuple[list[Attempt], int]:
    """A second pass: only now is it known which steps will be asked for.

    Keeping every step of the first pass would cost 16 bytes a row; a run of a hundred million rows
    must not need that.
    """
    ancestors = Ancestors([attempt.first_step for attempt in attempts])
    for rows, _, _ in woven(Findings()):
        ancestors.add(rows)
    found = [
        attempt._replace(resumes_after=after)
        for attempt, after in zip(attempts, ancestors.resumes_after, strict=True)
    ]
    return found, ancestors.stale
