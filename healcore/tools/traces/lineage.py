"""Which rows are still part of the run after it was resumed from an earlier step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from healcore.tools.traces.trace import Rows, Trace


class Ancestors:
    """For each attempt the last row that it goes on from. O(attempts) of memory.

    A row of attempt a with step t is part of attempt k > a exactly if no attempt b with a < b <= k
    began at or before t: if t is below the smallest first step of those.
    """

    def __init__(self, first_steps: Sequence[float]) -> None:
        """Takes the first step of every attempt, in order."""
        self._first = np.asarray(first_steps, np.float64)
        self.resumes_after: list[int | None] = [None] * len(first_steps)
        self.stale = 0
        self._attempt = -1
        self._limits = self._first[:0]
        self._top = -np.inf

    def add(self, rows: Rows) -> None:
        """The next chunk of `Trace.rows`."""
        if rows.attempt != self._attempt:
            self._attempt = rows.attempt
            self._limits = np.minimum.accumulate(self._first[rows.attempt + 1 :])
            self._top = -np.inf
        if not len(self._limits):
            return
        # A row that is written late (see weave) is where the run was when it was written.
        reached = np.maximum(self._top, np.maximum.accumulate(rows.step))
        self._top = reached[-1]
        before = np.searchsorted(reached, self._limits)
        for later in np.flatnonzero(before):
            self.resumes_after[rows.attempt + 1 + later] = int(rows.index[before[later] - 1])
        self.stale += len(reached) - int(before[-1])


def lineage(trace: Trace) -> Iterator[Rows]:
    """The run as it finally went: `trace.rows()` without stale tails and repeated steps.

    Of rows that log the same step and signals the last one stays. Chunks may be short.

    Raises:
        TraceError: as `Trace.rows`.
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
        part = _where(rows, keep)
        if last is not None and (not len(part.index) or not _replaces(part, last)):
            yield last
            last = None
        if len(part.index):
            # The last row waits: the next chunk may log its step once more.
            if len(part.index) > 1:
                yield _where(part, slice(0, -1))
            last = _where(part, slice(-1, None))
    if last is not None:
        yield last


def _replaced(rows: Rows) -> np.ndarray:
    """Flags (n - 1,): the next row logs the same step, and a signal of this row."""
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


def _where(rows: Rows, keep: np.ndarray | slice) -> Rows:
    index = rows.index[keep]
    return Rows(
        start=int(index[0]) if len(index) else rows.start,
        index=index,
        step=rows.step[keep],
        values={name: value[keep] for name, value in rows.values.items()},
        given={name: value[keep] for name, value in rows.given.items()},
        attempt=rows.attempt,
    )
