"""The engine's state along a run that was resumed: it goes back where the recording does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from healcore.core.step_record import StepRecord
from healcore.plugins.rows import MOST_ROWS, RowRunner, SignalRows, as_record, empty_columns
from healcore.tools.traces import Attempt


class Lineage:
    """Runs chunk after chunk, attempt after attempt."""

    def __init__(self, runner: RowRunner, attempts: Sequence[Attempt]) -> None:
        """Starts before the first row.

        Args:
            runner: the policy on a backend.
            attempts: those of the trace, in order.
        """
        self._runner = runner
        self._attempts = {each.number: each for each in attempts}
        # States after these rows are needed again, by attempts that resume there.
        self._wanted = sorted(
            {each.resumes_after for each in attempts if each.resumes_after is not None}
        )
        self._kept: dict[int, Any] = {}
        self._state: Any = None
        self._source = ""

    def enter(self, number: int) -> bool:
        """Goes to the state in which an attempt begins.

        An attempt that resumes takes the detectors as they were then, and budgets and the LR
        multiplier as they are now, like a live run that goes back. One that starts afresh in the
        same file goes back to the very beginning in the same way; one in a file of its own is
        another run.

        Returns:
            Whether the run goes on (budgets, incidents, LR); false: everything is new.
        """
        attempt = self._attempts[number]
        live, self._state = self._state, self._runner.start()
        same, self._source = attempt.source == self._source, attempt.source
        if live is None or (attempt.resumes_after is None and not same):
            return False
        if attempt.resumes_after is not None:
            self._state = self._kept.get(attempt.resumes_after, self._state)
        self._state = self._runner.on_rollback(live, self._state)
        return True

    def run(self, index: np.ndarray, rows: SignalRows, first: int) -> tuple[StepRecord, np.ndarray]:
        """Judges the rows of a chunk.

        Args:
            index: (n,) of the judged rows in the trace.
            rows: the judged rows.
            first: index of the first row, judged or not.

        Returns:
            A record of NumPy arrays (n,), and where a rollback was due, bool (n,).
        """
        # Rows that are not judged change nothing: the state after row w is that after the last
        # judged row up to w, in this chunk or, until proven otherwise, in a later one.
        wanted = self._wanted[bisect_left(self._wanted, first) :]
        places = np.searchsorted(index, np.array(wanted, np.int64), side="right")
        done, parts = 0, [empty_columns(0)]
        for place, after in zip((*places.tolist(), len(index)), (*wanted, None), strict=True):
            for part in _parts(done, place):
                self._state, found = self._runner.run(self._state, rows.part(part))
                parts.append(found)
            done = place
            if after is not None:
                self._kept[after] = self._state
        return as_record(tuple(map(np.concatenate, zip(*parts, strict=True))))


def _parts(start: int, stop: int) -> Iterator[slice]:
    for begin in range(start, stop, MOST_ROWS):
        yield slice(begin, min(begin + MOST_ROWS, stop))
