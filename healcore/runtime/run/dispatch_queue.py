"""`DispatchQueue`: the dispatches that the host has not read yet.

The host reads a dispatch a fixed number of dispatches after it was queued, so that reading does not
wait for the device. The delay does not depend on when records arrive, because all ranks have to act
at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.core.step_record import StepRecord, Why
from healcore.runtime.data import BatchId
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.run.progress import RunProgress

if TYPE_CHECKING:
    from healcore.runtime.run.trouble import Trouble

LAG = 1
"""Number of dispatches after which the host reads a decision, so that reading does not wait."""


class DispatchStart(NamedTuple):
    """Where a dispatch begins, and its batches. The host knows both before it reads the records."""

    index: int
    """Index of its first step in the run, from 0."""
    batches: tuple[BatchId, ...]
    """The batches of all its steps."""
    contents: tuple[Any, ...] = ()
    """Content of the batches if weights are compared on them."""


@dataclass
class StepResult:
    """One step whose records have been read."""

    index: int
    """Index of the step in the run, from 0."""
    records: list[StepRecord]
    """One record per engine, or more if an engine judged several times in the step."""
    batches: tuple[BatchId, ...]
    """The batches that the update was computed from; several with gradient accumulation."""
    contents: tuple[Any, ...] = ()
    """Content of the batches if weights are compared on them. The last step of a dispatch has the
    batches of all its steps, and the other steps have none."""
    steps_at_once: int = 1
    """Number of steps of its dispatch."""
    vote_requested: bool = False
    """Whether the dispatch asks the ranks to vote on the end, see `PendingDispatch`. Only the last
    step of a dispatch has it."""

    def __post_init__(self) -> None:
        """Joins the records of all engines, once: a step has few calls."""
        self.taken = self.judged = False
        """Whether an optimizer has stepped, and whether an engine has judged the step."""
        self.why: int = Why.TAKEN
        """Why an optimizer has not stepped, the first reason of `Why`; `TAKEN` if all have."""
        self.causes = 0
        """`Cause` flags of all records."""
        for record in self.records:
            self.taken |= not record.why
            self.judged |= record.judged
            self.causes |= int(record.cause)
            if record.why and (not self.why or record.why < self.why):
                self.why = record.why


class DispatchQueue:
    """Queue of dispatches. Each is read `LAG` dispatches after it was queued.

    Reading a dispatch at once would wait until the device has computed it, and the device would
    wait for the next dispatch meanwhile:

        host     dispatch n         read n - 1    dispatch n + 1    read n
        device   computes n ..................    computes n + 1 .........

    Args:
        progress: counts the steps. The host counts `PendingDispatch.count` steps when it queues a
            dispatch. The device may have taken another number of steps, for example with
            `optax.MultiSteps`, which is corrected when the dispatch is read.
    """

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self.clear()

    def clear(self) -> None:
        """Forgets everything, at a way back: batches of an accumulation belong to no later step."""
        self._queue: deque[tuple[PendingDispatch, DispatchStart]] = deque()
        """Dispatches, each with the index of its first step and its batches."""
        self._read_steps: deque[StepResult] = deque()
        """Steps of the dispatch that was read last, which `read_next` has not returned yet."""
        self.noted: deque[tuple[StepResult, Trouble | None]] = deque()
        """Steps that were read before a save in the body of the loop, with their orders, on which
        the next work between two steps acts."""
        self._batches: tuple[BatchId, ...] = ()
        """Batches of an accumulation whose update has not been read."""
        self._contents: tuple[Any, ...] = ()
        """Content of these batches."""

    def push(self, pending: PendingDispatch, first: DispatchStart) -> None:
        """Queues a dispatch.

        Args:
            pending: the records on the device.
            first: index of the first step, and the batches of all steps of the dispatch.
        """
        self._queue.append((pending, first))

    def read_all(self) -> Iterator[StepResult]:
        """Yields all queued steps, oldest first. Waits for the device."""
        while self.has_due(every=True):
            yield self.read_next()

    def has_due(self, *, every: bool = False) -> bool:
        """Whether a step is due, so that `read_next` returns it.

        A step is due once `LAG` later dispatches are queued: the device has probably computed it by
        then, and reading does not wait. The further steps of a dispatch that was read are due at
        once.

        Args:
            every: whether every queued step is due, as at the end of a run.
        """
        return bool(self._read_steps) or len(self._queue) > (0 if every else LAG)

    def read_next(self) -> StepResult:
        """Takes the oldest step out of the queue.

        Waits for the device, unless the dispatch of the step has been read.

        Raises:
            IndexError: no step is queued.
        """
        if not self._read_steps:
            self._read(*self._queue.popleft())
        return self._read_steps.popleft()

    def peek_all(self) -> list[StepResult]:
        """All queued steps, oldest first, which are due from then on. Waits for the device."""
        while self._queue:
            self._read(*self._queue.popleft())
        return [*self._read_steps]

    def _read(self, pending: PendingDispatch, first: DispatchStart) -> None:
        """Reads a dispatch, and gives each of its steps an index and batches."""
        steps = pending.read()
        more = len(steps) - pending.count
        if more:
            self._progress.step += more
            for place, (queued, later) in enumerate(self._queue):
                self._queue[place] = queued, later._replace(index=later.index + more)
        # With as many batches as steps, each step has its own batch. Otherwise steps share them.
        shares = len(steps) == 1 or len(first.batches) != len(steps)
        for place, records in enumerate(steps):
            is_last = place == len(steps) - 1
            vote_requested = pending.vote_requested and is_last
            step = StepResult(first.index + place, records, (), (), len(steps), vote_requested)
            self._batches += first.batches if shares else (first.batches[place],)
            if is_last:
                self._contents += first.contents
            # Accumulated batches belong to the update that their gradients go into.
            if step.taken or step.why != Why.NOT_DUE:
                step.batches, self._batches = self._batches, ()
                if is_last:
                    step.contents, self._contents = self._contents, ()
            self._read_steps.append(step)
