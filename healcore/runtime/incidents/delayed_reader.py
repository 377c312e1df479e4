"""Reads the records of each step a fixed number of steps later, without waiting for the device.

The delay does not depend on when records arrive, because all ranks have to act at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from healcore.core.step_record import StepRecord
from healcore.runtime.data import BatchId
from healcore.runtime.driver import PendingDispatch

LAG = 1
"""Number of dispatches after which the host reads a decision, so that reading does not wait."""


class StepResult(NamedTuple):
    """One step whose records have been read."""

    index: int
    records: list[StepRecord]
    """One record per engine, or more if an engine judged several times in the step."""
    batches: tuple[BatchId, ...]
    """Ids of the step's batches; several with gradient accumulation."""
    contents: tuple[Any, ...] = ()
    """Content of the batches if weights are compared on them. The last step of a dispatch has the
    batches of all its steps, and the other steps have none."""
    vote_requested: bool = False
    """`PendingDispatch.vote_requested` in the last step of a dispatch, otherwise False."""


class DelayedReader:
    """Queue of `LAG` dispatches."""

    def __init__(self) -> None:
        self._queue: deque[tuple[PendingDispatch, StepResult]] = deque()
        """Dispatches, each with the index of its first step and its batches."""
        self._read_steps: deque[StepResult] = deque()
        self._correction = 0
        self._accumulated: tuple[BatchId, ...] = ()
        self._contents: tuple[Any, ...] = ()

    def push(self, pending: PendingDispatch, first: StepResult) -> None:
        """Queues a dispatch. `first` has its first step's index and its batches, but no records."""
        self._queue.append((pending, first))

    def due(self, *, all: bool = False) -> Iterator[StepResult]:
        """Yields the steps that are due, oldest first; with `all` every queued step."""
        while True:
            while self._read_steps:
                yield self._read_steps.popleft()
            if len(self._queue) <= (0 if all else LAG):
                return
            self._read_steps.extend(self._read(*self._queue.popleft()))

    def count_correction(self) -> int:
        """Steps read since the last call, minus their expected number (`PendingDispatch.count`)."""
        correction, self._correction = self._correction, 0
        return correction

    def _read(self, pending: PendingDispatch, first: StepResult) -> Iterator[StepResult]:
        steps = pending.steps()
        more = len(steps) - pending.count
        if more:
            self._correction += more
            queue = [(each, step._replace(index=step.index + more)) for each, step in self._queue]
            self._queue = deque(queue)
        # With as many batches as steps, each step has its own batch. Otherwise steps share them.
        single = len(steps) > 1 and len(first.batches) == len(steps)
        for i, records in enumerate(steps):
            batches = self._accumulated + ((first.batches[i],) if single else first.batches)
            # Accumulated batches belong to the update that their gradients go into.
            has_stepped = not records[0].taken or any(each.judged for each in records)
            self._accumulated = () if has_stepped else batches
            contents: tuple[Any, ...] = ()
            is_last = i == len(steps) - 1
            if is_last:
                contents = self._contents + first.contents
                contents, self._contents = (contents, ()) if has_stepped else ((), contents)
            yield StepResult(
                first.index + i,
                records,
                () if self._accumulated else batches,
                contents,
                pending.vote_requested and is_last,
            )

    def clear(self) -> None:
        """Drops all queued steps, which a rollback has undone."""
        self._queue.clear()
        self._read_steps.clear()
        self._accumulated = self._contents = ()
