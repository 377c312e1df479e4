"""`BatchStream`: the batches of a loader in order, with ids, and the way back to any of them.

The `Cursor` is a stream that skips batches, and ends after the epochs that the loop asks for.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from healcore.console import error_text
from healcore.core.decision import Cause
from healcore.runtime.data.epoch_range import EpochRange
from healcore.runtime.data.loader_adapter import BatchIterator
from healcore.runtime.data.loader_epoch import LoaderEpoch
from healcore.runtime.data.loader_protocols import AnyBatch, AnyLoader
from healcore.runtime.data.position_history import PositionHistory
from healcore.runtime.data.positions import (
    BatchId,
    EmptyLoader,
    Position,
    SavedPosition,
)
from healcore.runtime.data.random_states import RandomStates, random_states, set_random_states
from healcore.runtime.data.read_retries import ReadRetries
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.data.unreadable_batch import UnreadableBatch
from healcore.runtime.faults.classification import classify

_SILENT_SECONDS = 5.0
"""Seconds of reading and dropping batches before the first line of progress."""

PutBack = Callable[[], object]
"""Sets the random states of an earlier moment."""
Inform = Callable[[str], object]
"""Takes a line for the log about the progress of a long read."""


class BatchStream:
    """Reads a loader, epoch after epoch. Nothing is read ahead.

    An epoch begins when its first batch or its state is needed. Beginning an epoch may draw random
    numbers (torch loaders do), and `position` and reading may begin an epoch. So take the position
    before the random state, and restore them in that order.

    After a failure in the network the batch is read again. The loader may have passed the batch, or
    may have drawn numbers for it. So loader and random states are moved back first:

        read batch 7 ── fails ── wait ── move back to batch 7 ── put random states back ── read

    How the loader is moved back depends on what it can do, see `_way_back_to`. If it can do
    nothing, the failure is raised.

    Args:
        loader: any object that can be iterated over, or a function without arguments that makes
            one, see `function_loader`.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        loader: the user's loader.
        next_id: the id of the next batch.
        last_id: the id of the last batch that the loop has received, or None after a rewind.
        inform: called with lines about the progress of a long read.
        limit: takes the number of an epoch, and returns the number of batches after which the epoch
            ends; or None if every epoch has all batches.
        unreadable: the batch whose reading made the last `next` raise, or None.
        put_back_random_states: sets the random states of before the next read, or None. A caller
            that keeps these states anyway sets this function, so that the stream need not read the
            states too.
    """

    def __init__(self, loader: AnyLoader, *, retries: ReadRetries | None = None) -> None:
        self._epoch = LoaderEpoch(loader, retries)
        self.loader = loader
        self.next_id = BatchId(0, 0)
        self.last_id: BatchId | None = None
        self.limit: Callable[[int], int] | None = None
        self.unreadable: BatchId | None = None
        self.inform: Inform = lambda line: None
        self.put_back_random_states: PutBack | None = None
        self._range = EpochRange()
        self._history = PositionHistory()
        self._first_rows: dict[int, list[int] | None] = {}
        """Epoch -> rows of its first batch, which a repeated epoch has to have again."""
        self._error: Exception | None = None
        """The exception of the last read, or None if it has succeeded."""
        self._retries = retries

    # -- reading --------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drops the rest of the epoch, after a `break`. The next batch is of the next epoch.

        Nothing is dropped before the first batch of an epoch, nor of an iterator, which continues
        where it is. So the next loop reads the same batches as without healcore.
        """
        if self.next_id.index > 0 and not isinstance(self.loader, Iterator):
            self.next_id = BatchId(self.next_id.epoch + 1, 0)
            self._epoch.drop()

    def close(self) -> None:
        """Releases the loader's iterator with its workers. Nothing can be read afterwards."""
        self._epoch.close()

    def _begin(self) -> BatchIterator:
        """The batches of the epoch; begins the epoch if necessary."""
        if self._epoch.batches is not None:
            return self._epoch.batches
        epoch = self.next_id.epoch
        return self._epoch.begin(epoch, by_user=epoch == self._range.requested)

    def _read(self) -> AnyBatch:
        """Reads the next batch.

        Raises:
            StopIteration: the epoch has ended.
            EmptyLoader: the epoch had no batch.
        """
        epoch = self._epoch
        batches = epoch.batches
        if batches is None:
            batches = self._begin()
        which = self.next_id
        following = BatchId(which.epoch, which.index + 1)
        self._error = None
        if self.limit is not None and which.index >= self.limit(which.epoch) > 0:
            self._end_at_limit()
            raise StopIteration
        try:
            batch = next(batches)
            if isinstance(batch, UnreadableBatch):
                raise batch.error
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            which.rows = epoch.adapter.rows()
            error.add_note(f"healcore: reading {which}")
            self._error, self.next_id = error, following  # torch loaders continue after it
            raise
        which.rows = epoch.adapter.rows()
        self.next_id = following
        if which.index == 0 and self._first_rows.setdefault(which.epoch, which.rows) != which.rows:
            self._first_rows[which.epoch] = which.rows
            self.inform(
                f"{epoch.name}: epoch {which.epoch} has other rows than before. Its samplers have "
                "to draw from a global generator, or from one that is an attribute of theirs"
            )
        return batch

    def _end_at_limit(self) -> None:
        """Ends an epoch that has more batches than its limit."""
        self._history.last_end = self.next_id
        if isinstance(self.loader, Iterator):  # the next epoch continues in the same stream
            self.next_id = BatchId(self.next_id.epoch + 1, 0)
        else:
            self.abandon()

    def _end(self) -> None:
        """Ends an epoch after the loader's last batch. Raises EmptyLoader if it had no batch."""
        epoch, index = self.next_id
        is_iterator = isinstance(self.loader, Iterator)
        ends_at_limit = is_iterator and self.limit is not None and epoch > 0
        if index == 0 and not self._epoch.may_be_empty and not ends_at_limit:
            raise EmptyLoader(epoch, self._epoch.name)
        self._epoch.end()
        # A state that was taken between two epochs may restore the end of the first epoch. Then no
        # batch was read, and the epoch keeps its number: its batches are still to come.
        if index > 0 and not is_iterator:
            self._history.last_end, self.next_id = self.next_id, BatchId(epoch + 1, 0)

    def _drop_until(self, goal: BatchId) -> None:
        """Reads and discards batches. An unreadable batch also counts as read.

        If the stream ends with a failure in the network, the failure is raised. While a batch is
        read again after such a failure (`reads_again`), the next failure is raised at once:
        `_read_again` counts it as an attempt.
        """
        reads_again = self._epoch.reads_again
        shown = time.monotonic()
        failure: Exception | None = None
        while self.next_id < goal:
            if time.monotonic() - shown > _SILENT_SECONDS:
                shown = time.monotonic()
                self.inform(
                    f"{self._epoch.name}: has read {self.next_id.index} of {goal.index} batches "
                    "again, to return to its position"
                )
            try:
                if reads_again:
                    self._read()
                else:
                    self._read_patiently()
            except StopIteration:
                if failure is not None:
                    raise failure from None
                raise
            except Exception as error:
                if error is not self._error:  # the epoch is empty
                    raise
                if classify(error).cause is Cause.NETWORK:
                    failure = error
                    if reads_again:
                        raise

    # -- reading again after failures in the network --------------------------------------------

    def _read_patiently(self) -> AnyBatch:
        """Reads the next batch, see `_read`, and reads it again after failures in the network."""
        if self._retries is None:
            return self._read()
        which, had_begun = self.next_id, self._epoch.batches is not None
        put_back, self.put_back_random_states = self.put_back_random_states, None
        if put_back is None and (which.index == 0 or self._epoch.adapter.draws):
            put_back = functools.partial(set_random_states, random_states())
        try:
            return self._read()
        except StopIteration:
            raise
        except Exception as error:
            if classify(error).cause is not Cause.NETWORK:
                raise
            failure = error
        # Outside of the `except` block: an error of the next attempt must not have this failure as
        # its context, or it would be classified as a failure in the network too.
        if put_back is None:  # reading draws no numbers, so the states are as before it
            put_back = functools.partial(set_random_states, random_states())
        go_back = self._way_back_to(which, put_back, had_begun=had_begun)
        return self._read_again(which, failure, self._retries, go_back)

    def _read_again(
        self,
        which: BatchId,
        failure: Exception,
        retries: ReadRetries,
        go_back: Callable[[], object] | None,
    ) -> AnyBatch:
        """Reads a batch again that a failure in the network has interrupted.

        The loader and the random states are moved back to the batch before each attempt. If that is
        impossible, the failure is raised. Without this, the batch would be lost, or the end of a
        generator that has raised would pass for the end of the data.

        Args:
            which: the batch that could not be read.
            failure: the exception of the read.
            retries: waits before each attempt, and says when to give up.
            go_back: result of `_way_back_to`.
        """
        name = self._epoch.name
        if go_back is None:
            failure.add_note(
                f"healcore: {name} cannot be moved back to {which}, so the batch is not read "
                "again. Pass a function that makes it, healer.batches(lambda: ...), which healcore "
                "calls again after a failure in the network"
            )
            raise failure
        adapter, last = self._epoch.adapter, self.last_id
        self.unreadable = which
        self._epoch.reads_again = adapter.reads_again = True
        try:
            while retries.wait_after(failure):
                try:
                    go_back()
                    batch = self._read()
                except (StopIteration, EmptyLoader):
                    failure.add_note(f"healcore: after this error {name} has ended before {which}")
                    break
                except Exception as error:
                    failure = error
                else:
                    retries.report_success()
                    self.unreadable = None
                    return batch
            raise failure
        finally:
            self.last_id = last
            self._epoch.reads_again = adapter.reads_again = False
            if self.unreadable is not None:  # also if a signal has ended the wait
                self.next_id = BatchId(which.epoch, which.index + 1)
                self._error = failure

    def _way_back_to(
        self, which: BatchId, put_back: PutBack, *, had_begun: bool
    ) -> Callable[[], object] | None:
        """Finds how to move loader and random states back to a batch that has raised.

            the loader                                            way back
            ----------------------------------------------------  ---------------------
            cannot be rewound, but is still at the batch          `_stay_at`
            can be rewound, and the batch is the epoch's first    `_begin_again_at`
            can be rewound, and a position before it is known     `_move_back_to`
            anything else                                         None

        Args:
            which: the batch that could not be read.
            put_back: sets the random states of before the read that has raised.
            had_begun: whether the epoch had begun before this read.

        Returns:
            A function that moves back, or None if that is impossible.
        """
        adapter, batches = self._epoch.adapter, self._epoch.batches
        if not self.can_rewind:
            if batches is None or not adapter.retry_in_place(batches):
                return None
            return functools.partial(self._stay_at, which, batches, put_back)
        if not adapter.can_read_again(which.index):
            return None
        if which.index == 0 and adapter.begins_again:
            states_of_begin = None
            if had_begun:
                states_of_begin = self._epoch.begin_states
            return functools.partial(self._begin_again_at, which, states_of_begin, put_back)
        position = self.position_before(which)
        if position is None:
            return None
        return functools.partial(self._move_back_to, which, position, put_back)

    def _stay_at(self, which: BatchId, batches: BatchIterator, put_back: PutBack) -> None:
        """Goes back to a batch that the loader's iterator has not passed."""
        self._epoch.adapter.retry_in_place(batches)
        put_back()
        self.next_id = which

    def _begin_again_at(
        self, which: BatchId, states_of_begin: RandomStates | None, put_back: PutBack
    ) -> None:
        """Goes back to the first batch of an epoch.

        If the epoch had begun before the read, its start draws its numbers again first, from the
        states that it had. Only then follow the random states of the read.
        """
        self.next_id = which
        self._epoch.drop()
        if states_of_begin is not None:
            set_random_states(states_of_begin)
            self._begin()
        put_back()

    def _move_back_to(self, which: BatchId, position: Mapping[str, Any], put_back: PutBack) -> None:
        """Goes back by a position before the batch, also at the end of the epoch before."""
        self._restore(self._epoch.decode(position))
        if self.next_id.epoch < which.epoch:
            with suppress(StopIteration):
                self._read()
        self.next_id = which
        put_back()

    # -- positions ------------------------------------------------------------------------------

    @property
    def can_rewind(self) -> bool:
        """Whether the loader can be rewound."""
        return self._epoch.adapter.obstacle is None

    def position(self) -> SavedPosition:
        """The position right after the last batch, for `rewind` and `fast_forward`.

        If the loader's state cannot be taken, the stream cannot be rewound from then on.

        Returns:
            Python values that any checkpoint can hold.
        """
        if self.next_id == (0, 0) and self.can_rewind:
            self._begin()  # an exception of iter() propagates, as in a loop without healcore
        try:
            # Beginning the next epoch for its state would read ahead.
            if self.can_rewind and not self._epoch.is_between_epochs:
                self._begin()
            position = self._epoch.encode(self.next_id, self._epoch.state())
        except Exception as error:  # the loader's code may raise anything
            reason = f"the state of {self._epoch.name} cannot be taken"
            self._epoch.forget_state(RewindObstacle(reason, error_text(error)))
            position = self._epoch.encode(self.next_id, None)
        if self.can_rewind:
            self._history.add(self.next_id, position)
        return position

    def position_before(self, batch: BatchId) -> SavedPosition | None:
        """The position before a batch that was read, or None if it cannot be reached.

        If the loader's state before the batch is unknown, the position has an earlier state of the
        same epoch and the number of batches since then.

        Args:
            batch: a batch that was read, or the next batch.
        """
        if batch == self.next_id:
            return self.position()
        if not self.can_rewind:
            return self._epoch.encode(batch, None)
        end = self._history.last_end
        if batch.index == 0 and end is not None and end.epoch == batch.epoch - 1:
            batch = end  # the next epoch's order may be drawn when it begins
        if batch.epoch == self.next_id.epoch:
            state = self._epoch.adapter.state_before(batch.index)
            if state is not None:
                return self._epoch.encode(batch, state)
        return self._history.before(batch)

    def _restore(self, target: Position) -> None:
        """Moves the loader to a position. If the loader raises, its position is unknown."""
        epoch, index = target.batch
        self.next_id, self.last_id = BatchId(epoch, 0), None  # a function may ask for the epoch
        behind = self._epoch.restore(target)
        self.next_id = BatchId(epoch, index - behind)
        self._drop_until(target.batch)
        self._error = None
