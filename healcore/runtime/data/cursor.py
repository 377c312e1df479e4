"""The data cursor, which yields batches with permanent ids and returns to earlier ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from healcore.console import error_text
from healcore.core.decision import Cause
from healcore.runtime.data.loaders import Loader, class_name, epoch_number, set_epoch_number
from healcore.runtime.data.positions import (
    BatchId,
    DataError,
    EmptyLoader,
    Position,
    SavedPosition,
    UnusableLoader,
    check_division,
    decode_position,
    division,
    state_text,
)
from healcore.runtime.data.random_states import random_states, set_random_states
from healcore.runtime.data.readers import (
    Reader,
    UnreadableBatch,
    function_name,
    is_function,
    reader_for,
)
from healcore.runtime.faults.classification import classify

if TYPE_CHECKING:
    from healcore.runtime.faults.retry import Retries

T = TypeVar("T")
_MAX_KNOWN = 4
"""A step may begin in the epoch before, and a save may come between."""

Limit = Callable[[int], int] | None
"""Takes the number of an epoch and returns its largest number of batches; None for no limit."""


class Cursor:
    """Reads the epochs of a loader that a loop asks for, skips batches, and moves to positions.

    There is one way to another place (`_move_to`): at a start, at a rollback, and to read a batch
    again after a failure in the network. The loader may have passed that batch, or may have drawn
    numbers for it.

    Nothing is read ahead. Beginning an epoch may draw random numbers (torch loaders do), and
    `position` may begin an epoch. So take the position before the random state, and restore them in
    that order.

    Args:
        loader: any object that can be iterated over, or a function without arguments that makes
            one, see `FunctionReader`.
        epochs: number of epochs, or None for no end. An iterator has one epoch.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        loader: the user's loader.
        name: the loader's class or function, for messages.
        next_id: the id of the next batch.
        limit: see `Limit`.
        is_used_up: whether the loader is an iterator that has yielded its last batch.
        unreadable: the batch whose reading made the last `next` raise, or None.
        skipped_batch_ids: ids of the batches to skip, also before the current position.
        passed_over: ids of the batches that were skipped, in order, until the caller clears it.

    Raises:
        UnusableLoader: the loader cannot be iterated over, or has fewer epochs.
        DataError: `epochs` is not a whole number >= 1.

    Examples:
        >>> cursor = Cursor(["a", "b", "c"])
        >>> before = cursor.position()
        >>> cursor.next()
        ('a', BatchId(epoch=0, index=0))
        >>> cursor.skipped_batch_ids.add(BatchId(0, 1))
        >>> cursor.next()
        ('c', BatchId(epoch=0, index=2))
        >>> cursor.seek(before)
        ''
        >>> cursor.next()
        ('a', BatchId(epoch=0, index=0))
    """

    def __init__(
        self, loader: Loader[Any], *, epochs: int | None = 1, retries: Retries | None = None
    ) -> None:
        self.loader: Any = loader
        self._is_iterator = isinstance(loader, Iterator)
        if is_function(loader):
            self.name = f"function {function_name(loader)}"
        elif isinstance(loader, type) or not (
            hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        ):
            raise UnusableLoader(
                f"a loader is something to iterate over, not {loader!r:.80}: pass a DataLoader, a "
                "dataset of batches, a list, or a function that makes one of these"
            )
        else:
            self.name = class_name(loader)
        self.next_id = BatchId(0, 0)
        self.limit: Limit = None
        self.is_used_up = False
        self.unreadable: BatchId | None = None
        self.skipped_batch_ids: set[BatchId] = set()
        self.passed_over: list[BatchId] = []
        self._end: float = 0
        """Reading ends before this epoch. Infinity for no end."""
        self._batches: Iterator[Any] | None = None
        """The rest of the epoch, or None if it has not begun."""
        self._is_between = False
        """Whether an epoch has ended and the next one has not begun, so that the loader's state is
        the state from which it begins. It does not begin only to take the state: it may draw an
        order before the program's code after the epoch has drawn its own numbers."""
        self._is_moved = False
        """Whether no batch of the epoch was read since a move: it may have none left."""
        self._requested: float = 0
        """Epoch that the user's loop has asked for, which has called `set_epoch` itself; or -1."""
        self._first_number: int | None = None
        """Argument of `set_epoch` for epoch 0, or None before the first epoch."""
        self._known: deque[SavedPosition] = deque(maxlen=_MAX_KNOWN)
        """The newest positions, from which a later batch of their epoch can be reached."""
        self._begin_states: Mapping[str, Any] = {}
        """Random states of before the epoch has begun."""
        self._error: Exception | None = None
        """The exception of the last read, or None if it has succeeded."""
        self._retries = retries
        self._reader: Reader = self._call_patiently(lambda: reader_for(loader))
        """Begins epochs of the loader."""
        self.read_epochs(0, epochs)

    # -- epochs ---------------------------------------------------------------------------------

    def read_epochs(self, first: float, epochs: int | None) -> None:
        """Makes `next` end after some epochs, for a loop that begins.

        Args:
            first: number of the first epoch, for which the program may have called `set_epoch`.
            epochs: number of epochs, or None for no end.

        Raises:
            DataError: `epochs` is not a whole number >= 1.
            UnusableLoader: the loader is an iterator, and `epochs` is above 1.
        """
        if epochs is None:
            self._end = math.inf
            return
        if type(epochs) is not int or epochs < 1:
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if self._is_iterator and epochs > 1:
            raise UnusableLoader(
                f"{self.name} is an iterator and has one epoch, not {epochs}: pass "
                "the loader that created it, or epochs=1"
            )
        self._requested, self._end = first, first + epochs

    @property
    def length(self) -> int | None:
        """Number of batches in the epoch, or None if the loader has no length.

        The smaller one of the loader's length and `limit`. The loader is asked each time, because a
        program may change it between two epochs.
        """
        if self.limit is None:
            lengths = []
        else:
            lengths = [self.limit(self.next_id.epoch)]
        with suppress(TypeError):
            lengths.append(len(self.loader))
        return min(lengths, default=None)

    def is_last(self) -> bool:
        """Whether the epoch has no further batch that is not skipped. False without a length."""
        epoch, index = self.next_id
        rest = range(index, self.length or 0)
        return self.length is not None and all((epoch, i) in self.skipped_batch_ids for i in rest)

    @property
    def at_end(self) -> bool:
        """Whether all batches of all epochs are read. False if the loader has no length."""
        return self.next_id.epoch == self._end - 1 and self.is_last()

    @property
    def break_place(self) -> str:
        """The place at which a `break` would leave batches unread, for a warning.

        Returns:
            A clause with epoch and batch. An empty string if a `break` would leave no batch, or if
            epochs or batches have no known end.
        """
        epoch, index = self.next_id
        length = self.length
        if not epoch < self._end < math.inf or length is None or self.at_end:
            return ""
        return f"a `break` in epoch {epoch}, before batch {index} of {length},"

    def abandon(self) -> None:
        """Drops the rest of the epoch, after a `break`. The next batch is of the next epoch.

        Nothing is dropped before the first batch of an epoch, nor of an iterator, which continues
        where it is. So the next loop reads the same batches as without healcore.
        """
        if self.next_id.index > 0 and not self._is_iterator:
            self._continue_at(BatchId(self.next_id.epoch + 1, 0), None)

    def _continue_at(
        self, batch: BatchId, batches: Iterator[Any] | None, *, is_between: bool = False
    ) -> None:
        """Continues at a batch, with the rest of its epoch or None if it has not begun."""
        self.next_id, self._batches, self._is_between = batch, batches, is_between

    def close(self) -> None:
        """Releases the loader's iterator with its workers. Nothing can be read afterwards."""
        self._batches = None
        self._reader = Reader(self.loader, obstacle=f"{self.name} is closed")

    # -- reading --------------------------------------------------------------------------------

    def next(self) -> tuple[Any, BatchId]:
        """The next batch that is not skipped, and its id.

        Exceptions of the loader propagate, with the batch's id and rows as a note. The batch counts
        as read, and the next call continues after it if the loader can. If the exception has ended
        the loader before the end of the epoch, as in a generator, the next call raises it again. An
        exception at a skipped batch is ignored, unless it ends the loader.

        Raises:
            StopIteration: there are no more epochs.
            EmptyLoader: an epoch has no batch.
        """
        self.unreadable = None
        while self.next_id.epoch < self._end and not self.is_used_up:
            self._begin()  # an exception of iter() belongs to no batch
            which, error = self.next_id, self._error
            is_skipped = which in self.skipped_batch_ids
            try:
                batch = self._read_patiently()
            except StopIteration:
                if error is not None and (self.length is None or which.index < self.length):
                    error.add_note(
                        f"healcore: {self.name} has ended with this error, as a generator "
                        "does: there is no batch after it to continue with"
                    )
                    raise error from None
                continue
            except DataError:
                raise
            except Exception:
                if not is_skipped:
                    self.unreadable = which
                    raise
            else:
                if which.index == 0:  # the order of the epoch may be drawn with this batch
                    self.position()
                if not is_skipped:
                    return batch, which
            self.passed_over.append(which)
        raise StopIteration

    def _begin(self) -> Iterator[Any]:
        """The batches of the epoch; begins the epoch if necessary."""
        if self._batches is None:
            if self._is_between:
                self.position()
            self._number_epoch(self.next_id.epoch)
            self._begin_states = random_states(self._reader.generators)
            self._batches = self._call_patiently(self._reader.begin)
            self._is_between = False
        return self._batches

    def _number_epoch(self, epoch: int, number: int | None = None) -> None:
        """Calls `set_epoch` for an epoch, or reads its number if the user's loop has called it.

        Args:
            epoch: the epoch.
            number: the number of a saved position, or None for the number that follows.
        """
        if number is None and epoch == self._requested:
            number = epoch_number(self.loader, default=epoch)
        else:
            if number is None:
                number = epoch + (self._first_number or 0)
            set_epoch_number(self.loader, number)
        self._first_number, self._requested = number - epoch, -1

    def _call_patiently(self, begin: Callable[[], T]) -> T:
        """Calls a function that begins to read, and calls it again after failures in the network.

        Each call begins with the random states of the first, because it may draw an order.
        """
        states = random_states()
        while True:
            try:
                begun = begin()
            except Exception as error:
                if self._retries is None or not self._retries.wait_after(error):
                    raise
                set_random_states(states)
            else:
                if self._retries is not None:
                    self._retries.failed = 0
                return begun

    def _read(self) -> Any:
        """Reads the next batch.

        Raises:
            StopIteration: the epoch has ended.
            EmptyLoader: the epoch had no batch.
        """
        batches, which = self._begin(), self.next_id
        self._error = None
        if self.limit is not None and which.index >= self.limit(which.epoch) > 0:
            # The next epoch of an iterator continues in the same stream.
            if self._is_iterator:
                rest = batches
            else:
                rest = None
            self._continue_at(BatchId(which.epoch + 1, 0), rest)
            raise StopIteration
        try:
            batch = next(batches)
            if isinstance(batch, UnreadableBatch):
                raise batch.error
        except StopIteration:
            self._end_epoch()
            raise
        except Exception as error:
            error.add_note(f"healcore: reading {self._passed(which)}")
            self._error = error  # torch loaders continue after it
            raise
        self._passed(which)
        self._is_moved = False
        return batch

    def _passed(self, which: BatchId) -> BatchId:
        """Counts a batch as read, and notes its rows."""
        self.next_id = BatchId(which.epoch, which.index + 1)
        which.rows = self._reader.rows(which.index + 1)
        return which

    def _end_epoch(self) -> None:
        """Ends an epoch after the loader's last batch. Raises EmptyLoader if it had no batch.

        The iterator is released, so that workers of the epoch end. An iterator that is the loader
        itself is kept: it cannot begin another epoch.
        """
        epoch, index = self.next_id
        ends_at_limit = self._is_iterator and self.limit is not None and epoch > 0
        if index == 0 and not self._is_moved and not ends_at_limit:
            raise EmptyLoader(epoch, self.name)
        if self._is_iterator:
            self.is_used_up = True
            return
        self._is_moved = False
        # A state between two epochs may restore the end of the first one. Then no batch was read,
        # and the epoch keeps its number: its batches are still to come.
        self._continue_at(BatchId(epoch + (index > 0), 0), None, is_between=True)

    def _read_patiently(self) -> Any:
        """Reads the next batch, see `_read`, and reads it again after failures in the network.

        Loader and random states are moved back before each attempt. If that is impossible, the
        failure is raised. Otherwise the batch would be lost, or the end of a generator that has
        raised would pass for the end of the data.
        """
        retries, which, states = self._retries, self.next_id, None
        target: Position | None = None
        failure: Exception | None = None
        if retries is None:
            return self._read()
        states = random_states()
        try:
            while True:
                try:
                    if target is not None:
                        self._move_to(target, self._read)
                        if which.index == 0:
                            generators = self._reader.generators
                        else:
                            generators = []
                        set_random_states(states, generators)
                    batch = self._read()
                except (StopIteration, EmptyLoader):
                    if failure is None:
                        raise
                    failure.add_note(
                        f"healcore: after this error {self.name} has ended before {which}"
                    )
                    break
                except Exception as error:
                    failure = error
                else:
                    retries.failed, self.unreadable = 0, None
                    return batch
                # Outside of the `except` block: an error of the next attempt must not have this
                # failure as its context, or it would be classified as one of the network too.
                if target is None and classify(failure).cause is Cause.NETWORK:
                    self.unreadable = which
                    target = self._place_to_read_again(which)
                    if which.index == 0:
                        states = self._begin_states
                    if target is None:
                        failure.add_note(
                            f"healcore: {self.name} cannot be moved back to {which}, so the batch "
                            "is not read again. Pass a function that makes it, "
                            "healer.batches(lambda: ...), which healcore calls again after a "
                            "failure in the network"
                        )
                if target is None or not retries.wait_after(failure):
                    break
            raise failure
        finally:
            if self.unreadable is not None:  # also if a signal has ended the wait
                self.next_id = BatchId(which.epoch, which.index + 1)
                self._error = failure

    def _place_to_read_again(self, which: BatchId) -> Position | None:
        """The position of a batch whose reading has failed, or None if it cannot be reached."""
        reader, position = self._reader, None
        if reader.obstacle:
            return None
        if which.index > 0:
            position = self.position_before(which)
        elif reader.begins_alone:  # the epoch begins again
            position = self._saved(which, reader.state(0, newest=False))
        if position is None:
            return None
        return decode_position(position)

    # -- positions ------------------------------------------------------------------------------

    @property
    def obstacle(self) -> str:
        """Why the loader cannot be moved to a position, or an empty string if it can.

        Without a move, a rollback restores the weights and continues with the next batches.
        """
        return self._reader.obstacle

    def position(self) -> SavedPosition:
        """The position right after the last batch, for `seek`.

        If the loader's state cannot be taken, the cursor cannot return from then on.

        Returns:
            Python values that any checkpoint can hold.
        """
        reader = self._reader
        if not (reader.obstacle or reader.replays or self._is_between):
            self._begin()  # the state may still be of the epoch that a `break` has left
        try:
            if self._batches is None:
                index = None
            else:
                index = self.next_id.index
            position = self._saved(self.next_id, reader.state(index, newest=True))
        except Exception as error:  # the loader's code may raise anything
            obstacle = f"the state of {self.name} cannot be taken: {error_text(error)}"
            self._reader = Reader(self.loader, obstacle=obstacle)
            position = self._saved(self.next_id, None)
        if not self.obstacle:
            self._known.append(position)
        return position

    def _saved(self, batch: BatchId, state: Any) -> SavedPosition:
        """A position with the state of the reader before a batch, or None."""
        number = self._first_number
        return {
            "kind": self._reader.kind,
            "epoch": batch.epoch,
            "index": batch.index,
            "state": state_text(state),
            "told_epoch": None if number is None else number + batch.epoch,
            "division": division(self.loader),
        }

    def position_before(self, batch: BatchId) -> SavedPosition | None:
        """The position before a batch that was read, or None if it cannot be reached.

        If the loader's state before the batch is unknown, the position has an earlier state of the
        same epoch, from which the batches until then are read and dropped.

        Args:
            batch: a batch that was read, or the next batch.
        """
        if batch == self.next_id:
            return self.position()
        state = None
        if not self.obstacle and batch.epoch == self.next_id.epoch:
            state = self._reader.state(batch.index, newest=False)
        if state is not None or self.obstacle:
            return self._saved(batch, state)
        for known in reversed(self._known):
            place = BatchId(known["epoch"], known["index"])
            if place == batch or (batch.epoch, 0) < place < batch:
                return {**known, "index": batch.index}
        return None

    def seek(self, position: Mapping[str, Any], *, reads_forward: bool = False) -> str:
        """Moves to a position, backwards or forwards, also into another epoch.

        Batches keep their ids, and batches that are skipped stay skipped. If the loader does not
        accept the position, it stays where it is.

        Args:
            position: result of `position` in this process or an earlier process.
            reads_forward: whether a loader that cannot be moved then reads and drops the batches of
                the epoch up to the position, as at a restart. Earlier epochs are not read.

        Returns:
            Why the cursor could not move, or an empty string.

        Raises:
            DataError: it is not a position, or the batches differ for this number of ranks.
            Exception: the loader failed on the position, and on the way back to the old position.
        """
        target = decode_position(position)
        check_division(target, division(self.loader), self.name)
        before, states, was_at = self.position(), random_states(), self.next_id
        obstacle, reason = self.obstacle, f"{self.name} does not accept the position"
        if not obstacle and target.kind != self._reader.kind:
            detail = f"it is of kind {target.kind!r}, and the run has another loader now"
            obstacle = f"{reason}: {detail}"
        if not obstacle:
            try:
                self._move_to(target, self._read_patiently)
            except Exception as error:  # the loader's code may raise anything
                obstacle = f"{reason}: {error_text(error)}"
                if isinstance(error, DataError):  # the reader has not moved
                    self.next_id = was_at
                    if before["told_epoch"] is not None:
                        self._number_epoch(was_at.epoch, before["told_epoch"])
                else:
                    self._move_to(decode_position(before), self._read_patiently)
                set_random_states(states)
            else:
                self._known.clear()
                self._known.append(dict(position))
                return ""
        if reads_forward and target.batch > was_at:
            with suppress(StopIteration):
                self._move_to(target.model_copy(update={"state": None}), self._read_patiently)
        return obstacle

    def _move_to(self, target: Position, read: Callable[[], Any]) -> None:
        """Moves the loader to a position. If the loader raises, its position is unknown.

        Batches between the loader's state and the position are read and dropped. An unreadable one
        also counts as read. A failure in the network is raised: the batches after it may be lost.

        Args:
            target: the position. Without a state, its epoch begins again.
            read: reads a batch.

        Raises:
            DataError: the reader cannot return to the position, and has not moved.
        """
        epoch, index = target.batch
        self.next_id = BatchId(epoch, 0)  # a function may ask for the epoch
        if target.told_epoch is not None:
            self._number_epoch(epoch, target.told_epoch)
        batches, at = None, 0
        if target.state is not None:
            batches, at = self._reader.resume(target.state, index)
        is_between = target.state is not None and batches is None
        self._continue_at(BatchId(epoch, at), batches, is_between=is_between)
        self._is_moved, self.is_used_up = True, False
        while self.next_id < target.batch:
            try:
                read()
            except StopIteration:
                raise
            except Exception as error:
                is_of_batch = error is self._error  # else the epoch is empty
                if not is_of_batch or classify(error).cause is Cause.NETWORK:
                    raise
        self._error = None
