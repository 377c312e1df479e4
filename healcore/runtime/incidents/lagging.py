"""Steps whose numbers are still on their way, read a fixed number of steps later.

Fixed, and not "when they are there": every rank has to act at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from healcore.runtime.data import BatchId
from healcore.runtime.driver import Handle, Told


class Taken(NamedTuple):
    """One step that was taken."""

    index: int
    """From 0."""
    handle: Handle
    batches: tuple[BatchId, ...]
    """Its data; several batches where gradients were accumulated."""


class Seen(NamedTuple):
    """One step that was read."""

    index: int
    told: list[Told]
    batches: tuple[BatchId, ...]


class Lagging:
    """A queue of `lag` steps."""

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
        self._queue: deque[Taken] = deque()
        self._unjudged: tuple[BatchId, ...] = ()

    def push(self, taken: Taken) -> None:
        """Adds the step just taken."""
        self._queue.append(taken)

    def due(self, *, all: bool = False) -> Iterator[Seen]:
        """The steps to be read now, oldest first.

        Args:
            all: read what is left, at the end of a run.
        """
        while len(self._queue) > (0 if all else self.lag):
            index, handle, batches = self._queue.popleft()
            told, batches = handle.read(), self._unjudged + batches
            # What was accumulated is the data of the update that it goes into.
            self._unjudged = () if any(each.judged for each in told) else batches
            yield Seen(index, told, () if self._unjudged else batches)

    def clear(self) -> None:
        """Forgets steps of a branch that was given up."""
        self._queue.clear()
        self._unjudged = ()
