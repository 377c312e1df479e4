"""`LoaderAdapter`: how the state of a loader of some kind is saved and restored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from healcore.runtime.data.loader_parts import AnyBatch, AnyLoader, LoaderState

BatchIterator = Iterator[AnyBatch]
"""The rest of an epoch."""


@dataclass(frozen=True)
class RewindObstacle:
    """Why a loader, or the loop over the epochs, cannot be rewound.

    `str(obstacle)` is the whole text, for notices and for the event about the data. Where a
    sentence names the reason of lost steps, the reason alone is enough.
    """

    reason: str
    """The reason, as a clause."""
    detail: str = ""
    """What to write instead, or the error of the loader; or an empty string."""

    def __str__(self) -> str:
        if not self.detail:
            return self.reason
        return f"{self.reason}: {self.detail}"


class LoaderAdapter:
    """Saves and restores a loader's state. This base class is for loaders without a state.

    An adapter begins the epochs of its loader (`start`), says where the reading is (`state`), and
    returns to a state (`resume`). The `Cursor` counts the batches and gives them ids.

    Args:
        loader: the user's loader.
        obstacle: why the loader has no state, or None for a loader that has one.
        first: the batches of the first epoch, if it has begun already because the iterator had to
            be examined. Otherwise None.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        obstacle: why the loader has no state and cannot be rewound, or None if it can.
        draws: whether reading a batch may draw from the global random generators of this process.
            The stream then keeps their states before each read, so that a repeated read draws the
            same numbers.
        begins_again: whether `start_again` begins an epoch that has begun already.
        reads_again: whether this rank reads a batch again while other ranks wait for it, so that
            nothing may be exchanged with them. The `Cursor` sets it.
    """

    kind = "forward"
    draws = False
    begins_again = False
    reads_again = False

    def __init__(
        self,
        loader: AnyLoader,
        *,
        obstacle: RewindObstacle | None = None,
        first: BatchIterator | None = None,
    ) -> None:
        self._loader = loader
        self.obstacle = obstacle
        self._first = first

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch.

        Args:
            epoch: number of the epoch, from 0.

        Returns:
            The batches of the epoch.
        """
        first, self._first = self._first, None
        if first is not None:
            return first
        return iter(self._loader)

    def start_again(self, epoch: int) -> BatchIterator:
        """Begins an epoch from its first batch that `start` has begun, if `begins_again`.

        Called after a failure in the network at the first batch. The order of the epoch must be the
        order of the first begin.
        """
        return self.start(epoch)

    def state_before(self, index: int) -> LoaderState | None:
        """The state before a batch of this epoch that was read, or None if it is not known.

        For loaders that record what they have read. A rollback to the first batch of a step then
        needs no state that was taken at that moment.

        Args:
            index: number of the batch in the epoch, below the number of batches read.
        """
        return None

    def state(self, *, ended: bool) -> LoaderState | None:
        """The state after the batch that was read last, or after the epoch that has ended.

        Args:
            ended: whether the epoch has ended, and the next epoch has not begun.

        Returns:
            The state, or None at the beginning of an epoch, if no state depends on the epoch.
        """

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Restores a state, and passes the next `skip` batches if they need not be read.

        Args:
            state: result of `state` or `state_before` in this or in an earlier process, not None.
            skip: number of batches to pass after the state.

        Returns:
            The rest of the epoch, or the next epoch; and the number of batches left to pass, which
            the caller reads and drops.

        Raises:
            NotImplementedError: the loader has no state.
        """
        raise NotImplementedError(str(self.obstacle))

    def rows(self) -> list[int] | None:
        """The dataset's indices of the batch that was read last, or None if they are unknown.

        Events name them, so that a user finds the samples of a bad batch. Most loaders do not know
        them.
        """
        return None

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can read this batch of the epoch again, if it can be rewound.

        False where reading exchanges messages with ranks that do not read again.
        """
        return True


class ReadRetries(Protocol):
    """The attempts to read a batch after failures in the network.

    `healcore.runtime.faults.retry.Retries` implements it with the policy's `[retry]`. The data
    layer knows only these two methods.
    """

    def wait_after(self, error: BaseException) -> bool:
        """Waits after a failed attempt.

        Args:
            error: the exception of the attempt.

        Returns:
            Whether to read again. False for an exception that is not a failure in the network, and
            after the last attempt.
        """
        ...

    def report_success(self) -> None:
        """Reports a success. After failures, the run's log gets a line."""
        ...


@dataclass
class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `Cursor` raises the error.

    Trainers read in generators, and a generator that raises is finished. This object passes through
    the generator as a batch, so the next batches can still be read. The user's loop never receives
    it.
    """

    error: Exception
    """The exception of the loader."""


def catch_unreadable(batches: BatchIterator) -> BatchIterator:
    """Yields batches, and an `UnreadableBatch` where reading raises.

    Args:
        batches: the batches of an epoch, which can continue after an exception.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            batch = UnreadableBatch(error)
        yield batch
