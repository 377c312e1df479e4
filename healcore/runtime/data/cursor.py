"""The data cursor, which yields batches with permanent ids and rewinds if the loader can."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from healcore.console import counted, error_text
from healcore.core.decision import Cause
from healcore.runtime.data.loaders import Loader, SamplerEpochs, class_name
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
    place_of,
    states_text,
)
from healcore.runtime.data.random_states import (
    RandomStates,
    generator_state,
    random_states,
    set_generator_states,
    set_random_states,
)
from healcore.runtime.data.readers import (
    Reader,
    RewindObstacle,
    UnreadableBatch,
    function_name,
    is_function,
    reader_for,
)
from healcore.runtime.faults.classification import classify

if TYPE_CHECKING:
    from healcore.runtime.faults.retry import Retries

T = TypeVar("T")
_MAX_POSITIONS = 4
"""Number of positions from which an earlier batch can be reached. Two are not enough: the last
position may be of the epoch after the batch's epoch."""

Limit = Callable[[int], int] | None
"""Takes the number of an epoch and returns its largest number of batches; None for no limit."""


class Cursor:
    """Reads the epochs of a loader that a loop asks for, skips batches, and moves to positions.

    Nothing is read ahead. Beginning an epoch may draw random numbers (torch loaders do), and
    `position` may begin an epoch. So take the position before the random state, and restore them in
    that order.

    After a failure in the network the batch is read again. The loader may have passed the batch, or
    may have drawn numbers for it. So loader and random states are moved back first.

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
        >>> cursor.rewind(before)
        True
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
        self._skipped: list[BatchId] = []
        """The batches skipped since `take_skipped`."""
        self._end: float = 0
        """Reading ends before this epoch. Infinity for no end."""
        self._batches: Iterator[Any] | None = None
        """The rest of the epoch, or None if it has not begun."""
        self._is_between = False
        """Whether an epoch has ended and the next one has not begun, so that the loader's state is
        the state from which it begins. It does not begin only to take the state: it may draw an
        order before the program's code after the epoch has drawn its own numbers."""
        self._is_restored = False
        """Whether the epoch was restored, and no batch was read since: it may have none left."""
        self._sampler_epochs = SamplerEpochs(loader)
        self._positions: deque[SavedPosition] = deque(maxlen=_MAX_POSITIONS)
        """The last positions, from which an earlier batch can be reached."""
        self._begin_states: RandomStates = {}
        """Random states of before the epoch has begun."""
        self._error: Exception | None = None
        """The exception of the last read, or None if it has succeeded."""
        self._rewind_error: RewindObstacle | None = None
        """Why the last `rewind` has failed, or None."""
        self._retries = retries
        self._reader: Reader = self._call_patiently(lambda: reader_for(loader))
        """Begins epochs of the loader."""
        self.read_epochs(0, epochs)

    # -- epochs ---------------------------------------------------------------------------------

    def extend(self, epochs: int | None = 1) -> None:
        """Allows further epochs, for programs that call `next` within their own `for epoch` loop.

        After a rewind into an earlier epoch, `next` finishes that epoch first. After a resume in a
        later epoch, `next` ends at once until the outer loop has reached that epoch.

        Args:
            epochs: number of further epochs, or None for no end.

        Raises:
            DataError: `epochs` is not a whole number >= 1.
            UnusableLoader: the loader is an iterator, and `epochs` is above 1.
        """
        self.read_epochs(self._end, epochs)

    def read_epochs(self, first: float, epochs: int | None) -> None:
        """Makes `next` end after some epochs, from number `first` on; see `extend`."""
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if self._is_iterator and epochs is not None and epochs > 1:
            raise UnusableLoader(
                f"{self.name} is an iterator and has one epoch, not {epochs}: pass "
                "the loader that created it, or epochs=1"
            )
        if epochs is None:
            self._end = math.inf
        elif first < math.inf:
            self._sampler_epochs.requested, self._end = first, first + epochs

    @property
    def length(self) -> int | None:
        """Number of batches in the epoch, or None if the loader has no length.

        The smaller one of the loader's length and `limit`. The loader is asked each time, because a
        program may change it between two epochs.
        """
        lengths = [] if self.limit is None else [self.limit(self.next_id.epoch)]
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
            self._move(BatchId(self.next_id.epoch + 1, 0), None)

    def _move(
        self, batch: BatchId, batches: Iterator[Any] | None, *, is_between: bool = False
    ) -> None:
        """Continues at a batch, with the rest of its epoch or None if it has not begun."""
        self.next_id, self._batches, self._is_between = batch, batches, is_between

    def close(self) -> None:
        """Releases the loader's iterator with its workers. Nothing can be read afterwards."""
        self._batches = None
        self._reader = Reader(self.loader, obstacle=RewindObstacle(f"{self.name} is closed"))

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
                # The order of an epoch may be drawn when its first batch is read. A position from
                # before this batch then serves only for this batch, so one after it is taken.
                if self._positions and place_of(self._positions[-1]) < (which.epoch, 1):
                    self.position()
                if not is_skipped:
                    return batch, which
            self._skipped.append(which)
        raise StopIteration

    def take_skipped(self) -> list[BatchId]:
        """Ids of the batches skipped since the last call, in order."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _begin(self) -> Iterator[Any]:
        """The batches of the epoch; begins the epoch if necessary."""
        if self._batches is None:
            epoch, reader = self.next_id.epoch, self._reader
            if self._is_between:
                self.position()
            self._sampler_epochs.begin(epoch)
            self._begin_states = random_states(reader.generators)
            self._batches = self._call_patiently(reader.begin)
            self._is_between = False
        return self._batches

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
            rest = batches if self._is_iterator else None
            self._move(BatchId(which.epoch + 1, 0), rest)
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
        self._is_restored = False
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
        if index == 0 and not self._is_restored and not ends_at_limit:
            raise EmptyLoader(epoch, self.name)
        if self._is_iterator:
            self.is_used_up = True
            return
        self._is_restored = False
        # A state between two epochs may restore the end of the first one. Then no batch was read,
        # and the epoch keeps its number: its batches are still to come.
        self._move(BatchId(epoch + (index > 0), 0), None, is_between=True)

    def _drop_until(self, goal: BatchId, read: Callable[[], Any]) -> None:
        """Reads and discards batches. An unreadable batch also counts as read.

        A failure in the network is raised: the batches after it may be lost too.
        """
        while self.next_id < goal:
            try:
                read()
            except StopIteration:
                raise
            except Exception as error:
                is_of_batch = error is self._error  # else the epoch is empty
                if not is_of_batch or classify(error).cause is Cause.NETWORK:
                    raise

    # -- reading again after failures in the network --------------------------------------------

    def _read_patiently(self) -> Any:
        """Reads the next batch, see `_read`, and reads it again after failures in the network.

        The loader and the random states are moved back before each attempt. If that is impossible,
        the failure is raised. Without this, the batch would be lost, or the end of a generator that
        has raised would pass for the end of the data.
        """
        retries, which, position = self._retries, self.next_id, None
        states = {} if retries is None else random_states()
        try:
            return self._read()
        except StopIteration:
            raise
        except Exception as error:
            if retries is None or classify(error).cause is not Cause.NETWORK:
                raise
            failure = error
        # Outside of the `except` block: an error of the next attempt must not have this failure as
        # its context, or it would be classified as a failure in the network too.
        if which.index == 0:  # the epoch begins again
            states = self._begin_states
            if self._reader.begins_alone:
                position = self._saved(which, self._reader.state(0, newest=False))
        elif self.can_rewind:
            position = self.position_before(which)
        if position is None or not self.can_rewind:
            failure.add_note(
                f"healcore: {self.name} cannot be moved back to {which}, so the batch is not read "
                "again. Pass a function that makes it, healer.batches(lambda: ...), which healcore "
                "calls again after a failure in the network"
            )
            raise failure
        self.unreadable = which
        try:
            while retries.wait_after(failure):
                try:
                    self._move_to(decode_position(position), self._read)
                    set_random_states(states)
                    batch = self._read()
                except (StopIteration, EmptyLoader):
                    failure.add_note(
                        f"healcore: after this error {self.name} has ended before {which}"
                    )
                    break
                except Exception as error:
                    failure = error
                else:
                    retries.failed = 0
                    self.unreadable = None
                    return batch
            raise failure
        finally:
            if self.unreadable is not None:  # also if a signal has ended the wait
                self.next_id = BatchId(which.epoch, which.index + 1)
                self._error = failure

    # -- positions ------------------------------------------------------------------------------

    @property
    def can_rewind(self) -> bool:
        """Whether the loader can be rewound."""
        return self._reader.obstacle is None

    @property
    def rewind_obstacle(self) -> RewindObstacle | None:
        """Why the loader cannot be rewound, or why the last `rewind` failed, or None.

        The log and the report of a rollback name the reason: without a rewind, a rollback restores
        the weights and continues with the next batches.
        """
        return self._reader.obstacle or self._rewind_error

    def position(self) -> SavedPosition:
        """The position right after the last batch, for `rewind` and `fast_forward`.

        If the loader's state cannot be taken, the cursor cannot be rewound from then on.

        Returns:
            Python values that any checkpoint can hold.
        """
        reader = self._reader
        if self.can_rewind and not reader.replays and not self._is_between:
            self._begin()  # the state may still be of the epoch that a `break` has left
        try:
            index = None if self._batches is None else self.next_id.index
            position = self._saved(self.next_id, reader.state(index, newest=True))
        except Exception as error:  # the loader's code may raise anything
            obstacle = RewindObstacle(
                f"the state of {self.name} cannot be taken", error_text(error)
            )
            self._reader = Reader(self.loader, obstacle=obstacle)
            position = self._saved(self.next_id, None)
        if self.can_rewind:
            self._positions.append(position)
        return position

    def _saved(self, batch: BatchId, state: Any) -> SavedPosition:
        """A position with the state of the reader before a batch, or None."""
        reader, generators = self._reader, None
        if batch.index == 0 and batch.epoch == self.next_id.epoch and self.next_id.index > 0:
            generators = self._begin_states.get("own", [])
        elif reader.draws_in_order or batch.index == 0:
            generators = [generator_state(each) for each in reader.generators]
        return {
            "kind": reader.kind,
            "epoch": batch.epoch,
            "index": batch.index,
            "state": states_text((state, generators)) if reader.obstacle is None else None,
            "told_epoch": self._sampler_epochs.number(batch.epoch),
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
        if self.can_rewind and batch.epoch == self.next_id.epoch:
            state = self._reader.state(batch.index, newest=False)
        if state is not None or not self.can_rewind:
            return self._saved(batch, state)
        for position in reversed(self._positions):
            known = place_of(position)
            if known == batch or (known.epoch == batch.epoch and 0 < known.index < batch.index):
                return {**position, "index": batch.index}
        return None

    def rewind(self, position: Mapping[str, Any]) -> bool:
        """Moves to a position, backwards or forwards, also into another epoch.

        Batches keep their ids, and batches that are skipped stay skipped. No failure leaves the
        loader at an unknown place without an exception.

        Args:
            position: result of `position` in this process or an earlier process.

        Returns:
            False if the cursor could not move; `rewind_obstacle` has the reason.

        Raises:
            Exception: the loader failed on the position, and on the way back to the old position.
        """
        if not self.can_rewind:
            return False
        before, states, was_at = self.position(), random_states(), self.next_id
        if not self.can_rewind:
            return False
        try:
            target = self._decoded(position)
            if target.kind != self._reader.kind:
                raise DataError(
                    f"it is of kind {target.kind!r}, and the run has another loader now"
                )
            self._move_to(target, self._read_patiently)
        except Exception as error:  # the loader's code may raise anything
            reason = f"{self.name} does not accept the position"
            self._rewind_error = RewindObstacle(reason, error_text(error))
            self.next_id = was_at
            if not isinstance(error, DataError):  # else the reader has not moved
                self._move_to(decode_position(before), self._read_patiently)
            self._sampler_epochs.restore(self.next_id.epoch, before["told_epoch"])
            set_random_states(states)
            return False
        self._positions.clear()
        self._positions.append(dict(position))
        self._rewind_error = None
        return True

    def fast_forward(self, position: Mapping[str, Any]) -> str:
        """Moves forward by reading and dropping batches, for loaders without a state.

        Earlier epochs are not read again.

        Args:
            position: result of `position` in this process or an earlier process.

        Returns:
            A sentence about the batches that were dropped, or "" if none was.

        Raises:
            DataError: it is not a position, or the batches differ for this number of ranks.
        """
        target = self._decoded(position)
        goal = target.batch
        if goal <= self.next_id:
            return ""
        with suppress(StopIteration):
            self._move_to(target, self._read_patiently, has_state=False)
        if goal.index == 0:
            return ""
        if self.next_id != goal:
            return f"epoch {goal.epoch} has fewer than {goal.index} batches: continues after it"
        order = "a loader that shuffles by itself may give different batches"
        if self._rewind_error is not None:
            order = f"the batches may differ from before: {self._rewind_error}"
        return (
            f"read {counted(goal.index, 'batch', 'batches')} and dropped them, up to batch "
            f"{goal.index} of epoch {goal.epoch}; {order}"
        )

    def _decoded(self, position: Any) -> Position:
        """A position for this loader. Raises DataError, also if its batch has other rows here."""
        target = decode_position(position)
        check_division(target, division(self.loader), self.name)
        return target

    def _move_to(
        self, target: Position, read: Callable[[], Any], *, has_state: bool = True
    ) -> None:
        """Moves the loader to a position. If the loader raises, its position is unknown.

        Raises:
            DataError: the reader cannot return to the position, and has not moved.
        """
        epoch, index = target.batch
        self.next_id = BatchId(epoch, 0)  # a function may ask for the epoch
        self._sampler_epochs.restore(epoch, target.told_epoch)
        batches, at = None, 0
        state, generators = (has_state and target.state) or (None, None)
        if state is not None:
            batches, at = self._reader.resume(state, index)
        if generators is not None:
            set_generator_states(self._reader.generators, generators)
        is_between = state is not None and batches is None
        self._move(BatchId(epoch, at), batches, is_between=is_between)
        self._is_restored, self.is_used_up = True, False
        self._drop_until(target.batch, read)
        self._error = None
