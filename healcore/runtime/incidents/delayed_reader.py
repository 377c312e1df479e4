"""Steps whose records are still on their way, read a fixed number of steps later.

Fixed, and not "when they are there": every rank has to act at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from healcore.core.step_record import StepRecord
from healcore.runtime.data import BatchId
from healcore.runtime.driver import PendingDispatch


class TakenDispatch(NamedTuple):
    """A dispatch that the loop has made, and its data."""

    index: int
    """Of its first step, from 0."""
    pending: PendingDispatch
    batches: tuple[BatchId, ...]
    """Its data; several batches where gradients were accumulated, or for several steps."""
    batch: Any = None
    """The last of them itself, where it is wanted."""


class JudgedStep(NamedTuple):
    """One step that was read."""

    index: int
    records: list[StepRecord]
    """One per engine that has judged it, several where one judged several times in it."""
    batches: tuple[BatchId, ...]
    batch: Any = None


class DelayedReader:
    """A queue of `lag` dispatches."""

    def __init__(self, lag: int) -> None:
        """Starts empty.

        Raises:
            ValueError: `lag` is not a whole number from 0 to 100.
        """
        if isinstance(lag, bool) or not isinstance(lag, int) or not 0 <= lag <= 100:
            raise ValueError(
                f"lag is a whole number from 0 to 100, the steps after which a decision is read, "
                f"not {lag!r}"
            )
        self.lag = lag
        self._queue: deque[TakenDispatch] = deque()
        self._ready: deque[JudgedStep] = deque()
        self._shift = 0
        self._unjudged: tuple[BatchId, ...] = ()

    def push(self, taken: TakenDispatch) -> None:
        """Adds what was just taken."""
        self._queue.append(taken)

    def due(self, *, all: bool = False) -> Iterator[JudgedStep]:
        """The steps to be read now, oldest first.

        Args:
            all: read what is left, at the end of a run.
        """
        while True:
            while self._ready:
                yield self._ready.popleft()
            if len(self._queue) <= (0 if all else self.lag):
                return
            self._ready.extend(self._read(self._queue.popleft()))

    def miscounted(self) -> int:
        """Steps that dispatches had beyond what they were taken to have, since the last call."""
        shift, self._shift = self._shift, 0
        return shift

    def _read(self, taken: TakenDispatch) -> Iterator[JudgedStep]:
        steps = taken.pending.steps()
        more = len(steps) - taken.pending.count
        if more:
            self._shift += more
            queue = [each._replace(index=each.index + more) for each in self._queue]
            self._queue = deque(queue)
        # As many batches as steps: one for each. Otherwise each step has a part of all of them.
        single = len(steps) > 1 and len(taken.batches) == len(steps)
        for i, records in enumerate(steps):
            batches = self._unjudged + ((taken.batches[i],) if single else taken.batches)
            # What was accumulated is the data of the update that it goes into.
            self._unjudged = () if any(each.judged for each in records) else batches
            yield JudgedStep(
                taken.index + i, records, () if self._unjudged else batches, taken.batch
            )

    def clear(self) -> None:
        """Forgets steps of a branch that was given up."""
        self._queue.clear()
        self._ready.clear()
        self._unjudged = ()
