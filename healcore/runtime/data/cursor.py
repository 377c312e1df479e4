"""The data cursor, which yields batches with permanent ids and rewinds if the loader can."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, TypeVar

from healcore.console import counted, error_text
from healcore.core.decision import Cause
from healcore.runtime.data.function_loader import function_name, is_function, reader_for
from healcore.runtime.data.loader_adapter import (
    BatchIterator,
    LoaderAdapter,
    ReadRetries,
    RewindObstacle,
    UnreadableBatch,
)
from healcore.runtime.data.loader_parts import AnyBatch, AnyLoader, Loader, class_name
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
    encode_position,
    place_of,
)
from healcore.runtime.data.random_states import RandomStates, random_states, set_random_states
from healcore.runtime.data.sampler_epochs import SamplerEpochs
from healcore.runtime.faults.classification import classify

T = TypeVar("T")
_SILENT_SECONDS = 5.0
"""Seconds of reading and dropping batches before the first line of progress."""
_MAX_POSITIONS = 4
"""Number of positions from which an earlier batch can be reached. Two are not enough: the last
position may be of the epoch after the batch's epoch."""

Inform = Callable[[str], object]
"""Takes a line for the log about the progress of a long read."""
Limit = Callable[[int], int] | None
"""Takes the number of an epoch and returns its largest number of batches; None for no limit."""


class EpochPhase(Enum):
    """How far the reading of a loader is within its epochs.

    The loader's iterator exists in the phases READING, RESTORED and EXHAUSTED only.

        event                                  from                to
        -------------------------------------  ------------------  --------------
        the epoch begins                       NOT_BEGUN, BETWEEN  READING
        it ends, and the loader begins again   READING, RESTORED   BETWEEN
        it ends, and the loader is an iterator READING, RESTORED   EXHAUSTED
        its rest is dropped, as by a `break`   any                 NOT_BEGUN
        a rewind                               any                 RESTORED, BETWEEN without a state
    """

    NOT_BEGUN = "not begun"
    """The next epoch has to begin before its state can be taken.

    At the first use of the loader, and after a `break`. After a `break` the loader's own state
    still belongs to the epoch that was left, and a restore would continue this epoch.
    """
    READING = "reading"
    """The epoch was begun. An epoch that ends now without a batch is an error, `EmptyLoader`."""
    RESTORED = "restored"
    """The epoch was restored from a state. It may have no batch left, which is not an error."""
    BETWEEN = "between two epochs"
    """An epoch has ended, and the next one has not begun.

    A state that is taken now is the state after the end. The next epoch does not begin only to take
    its state: it may draw an order from the random generators, before the program's code after the
    epoch has drawn its own numbers.
    """
    EXHAUSTED = "exhausted"
    """The only epoch of an iterator has ended."""


class Cursor:
    """Reads the epochs of a loader that a loop asks for, skips batches, and moves to positions.

    Nothing is read ahead. An epoch begins when its first batch or its state is needed. Beginning an
    epoch may draw random numbers (torch loaders do), and `position` may begin an epoch. So take the
    position before the random state, and restore them in that order.

    After a failure in the network the batch is read again. The loader may have passed the batch, or
    may have drawn numbers for it. So loader and random states are moved back first:

        read batch 7 ── fails ── wait ── move back to batch 7 ── put random states back ── read

    Args:
        loader: any object that can be iterated over, or a function without arguments that makes
            one, see `function_loader`.
        epochs: number of epochs, or None for no end. An iterator has one epoch.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        loader: the user's loader.
        name: the loader's class or function, for messages.
        next_id: the id of the next batch.
        last_id: the id of the last batch that the loop has received, or None after a rewind.
        inform: called with lines about the progress of a long read.
        limit: see `Limit`.
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
        self, loader: Loader[Any], *, epochs: int | None = 1, retries: ReadRetries | None = None
    ) -> None:
        self.loader: AnyLoader = loader
        self._is_iterator = isinstance(loader, Iterator)
        if is_function(loader):
            self.name = f"function {function_name(loader)}"
        else:
            self.name = class_name(loader)
            _check_iterable(loader)
        self.next_id = BatchId(0, 0)
        self.last_id: BatchId | None = None
        self.inform: Inform = lambda line: None
        self.limit: Limit = None
        self.unreadable: BatchId | None = None
        self.skipped_batch_ids: set[BatchId] = set()
        self._skipped: list[BatchId] = []
        """The batches skipped since `take_skipped`."""
        self._requested: float = 0
        """First epoch that the program's loop has asked for last, which has called `set_epoch`."""
        self._end: float = 0
        """Reading ends before this epoch. Infinity for no end."""
        self._phase = EpochPhase.NOT_BEGUN
        self._batches: BatchIterator | None = None
        """The rest of the epoch, or None if it has not begun."""
        self._sampler_epochs = SamplerEpochs(loader)
        self._positions: deque[SavedPosition] = deque(maxlen=_MAX_POSITIONS)
        """The last positions, from which an earlier batch can be reached."""
        self._last_end: BatchId | None = None
        """Id after the last batch of the last complete epoch. The start of the next epoch is the
        same place, but the next epoch may draw its order when it begins."""
        self._first_rows: dict[int, list[int] | None] = {}
        """Epoch -> rows of its first batch, which a repeated epoch has to have again."""
        self._error: Exception | None = None
        """The exception of the last read, or None if it has succeeded."""
        self._rewind_error: RewindObstacle | None = None
        """Why the last `rewind` has failed, or None."""
        self._retries = retries
        self._begin_states: RandomStates = {}
        """Random states before the epoch has begun. Empty without `retries`."""
        self._reader_or_none: LoaderAdapter | None = None
        self.extend(epochs)

    @property
    def _reader(self) -> LoaderAdapter:
        """Begins epochs of the loader, and saves and restores its state.

        Made on first use. To find out what an iterator can do, the iterator may have to be made,
        and that begins an epoch and draws its order. A failure in the network is retried.
        """
        if self._reader_or_none is None:
            self._reader_or_none = self._call_patiently(lambda: reader_for(self.loader))
        return self._reader_or_none

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
        """Makes `next` end after some epochs; see `extend`.

        Args:
            first: number of the first epoch.
            epochs: number of epochs, or None for no end.
        """
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
            self._requested, self._end = first, first + epochs

    @property
    def is_used_up(self) -> bool:
        """Whether the loader is an iterator that has yielded its last batch."""
        return self._phase is EpochPhase.EXHAUSTED

    @property
    def length(self) -> int | None:
        """Number of batches in the epoch, or None if the loader has no length.

        The smaller one of the loader's length and `limit`. The loader is asked each time, because a
        program may change it between two epochs.
        """
        lengths = []
        if self.limit is not None:
            lengths.append(self.limit(self.next_id.epoch))
        with suppress(TypeError):
            lengths.append(len(self.loader))
        return min(lengths, default=None)

    def is_last(self) -> bool:
        """Whether the epoch is exhausted. False if the loader has no length.

        Skipped batches do not count. Call it between two batches.
        """
        length = self.length
        if length is None:
            return False
        epoch, index = self.next_id
        rest = range(index, length)
        return all((epoch, following) in self.skipped_batch_ids for following in rest)

    @property
    def at_end(self) -> bool:
        """Whether all batches of all epochs are read.

        False if the loader has no length: its end is known only when it raises StopIteration.
        Skipped batches count as read.
        """
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
            self.next_id = BatchId(self.next_id.epoch + 1, 0)
            self._drop()

    def _drop(self) -> None:
        """Drops the rest of the epoch. The next batch begins an epoch."""
        self._batches, self._phase = None, EpochPhase.NOT_BEGUN

    def close(self) -> None:
        """Releases the loader's iterator with its workers. Nothing can be read afterwards."""
        self._batches = None
        self._forget_state(RewindObstacle(f"{self.name} is closed"))

    # -- reading --------------------------------------------------------------------------------

    def next(self) -> tuple[AnyBatch, BatchId]:
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
                self.unreadable = which
                if not is_skipped:
                    raise
                self.unreadable = None
            else:
                # The order of an epoch may be drawn when its first batch is read. A position from
                # before this batch then serves only for this batch, so one after it is taken.
                if self._positions and place_of(self._positions[-1]) < (which.epoch, 1):
                    self.position()
                if not is_skipped:
                    self.last_id = which
                    return batch, which
            self._skipped.append(which)
        raise StopIteration

    def take_skipped(self) -> list[BatchId]:
        """Ids of the batches skipped since the last call, in order."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _begin(self) -> BatchIterator:
        """The batches of the epoch; begins the epoch if necessary."""
        if self._batches is not None:
            return self._batches
        epoch = self.next_id.epoch
        self._sampler_epochs.begin(epoch, by_user=epoch == self._requested)
        self._phase = EpochPhase.NOT_BEGUN  # stays if the loader raises
        reader = self._reader
        if reader.reads_again:
            self._batches = reader.start_again(epoch)
        else:
            if self._retries is not None:
                self._begin_states = random_states()
            self._batches = self._call_patiently(lambda: reader.start(epoch))
        self._phase = EpochPhase.READING
        return self._batches

    def _call_patiently(self, begin: Callable[[], T]) -> T:
        """Calls a function that begins to read, and calls it again after failures in the network.

        Each call begins with the random states of the first, because it may draw an order.
        """
        if self._retries is None:
            return begin()
        states = random_states()
        while True:
            try:
                begun = begin()
            except Exception as error:
                if not self._retries.wait_after(error):
                    raise
                set_random_states(states)
            else:
                self._retries.report_success()
                return begun

    def _read(self) -> AnyBatch:
        """Reads the next batch.

        Raises:
            StopIteration: the epoch has ended.
            EmptyLoader: the epoch had no batch.
        """
        batches, which = self._begin(), self.next_id
        following = BatchId(which.epoch, which.index + 1)
        self._error = None
        if self.limit is not None and which.index >= self.limit(which.epoch) > 0:
            self._last_end = which
            self.abandon()
            if self._is_iterator:  # the next epoch continues in the same stream
                self.next_id = BatchId(which.epoch + 1, 0)
            raise StopIteration
        try:
            batch = next(batches)
            if isinstance(batch, UnreadableBatch):
                raise batch.error
        except StopIteration:
            self._end_epoch()
            raise
        except Exception as error:
            which.rows = self._reader.rows()
            error.add_note(f"healcore: reading {which}")
            self._error, self.next_id = error, following  # torch loaders continue after it
            raise
        which.rows = self._reader.rows()
        self.next_id = following
        if which.index == 0 and self._first_rows.setdefault(which.epoch, which.rows) != which.rows:
            self._first_rows[which.epoch] = which.rows
            self.inform(
                f"{self.name}: epoch {which.epoch} has other rows than before. Its samplers have "
                "to draw from a global generator, or from one that is an attribute of theirs"
            )
        return batch

    def _end_epoch(self) -> None:
        """Ends an epoch after the loader's last batch. Raises EmptyLoader if it had no batch.

        The iterator is released, so that workers of the epoch end. An iterator that is the loader
        itself is kept: it cannot begin another epoch.
        """
        epoch, index = self.next_id
        ends_at_limit = self._is_iterator and self.limit is not None and epoch > 0
        if index == 0 and self._phase is not EpochPhase.RESTORED and not ends_at_limit:
            raise EmptyLoader(epoch, self.name)
        if self._is_iterator:
            self._phase = EpochPhase.EXHAUSTED
            return
        self._batches, self._phase = None, EpochPhase.BETWEEN
        # A state that was taken between two epochs may restore the end of the first epoch. Then no
        # batch was read, and the epoch keeps its number: its batches are still to come.
        if index > 0:
            self._last_end, self.next_id = self.next_id, BatchId(epoch + 1, 0)

    def _drop_until(self, goal: BatchId) -> None:
        """Reads and discards batches. An unreadable batch also counts as read.

        If the stream ends with a failure in the network, the failure is raised. While a batch is
        read again after such a failure, the next failure is raised at once: it is an attempt.
        """
        again = self._reader.reads_again
        shown = time.monotonic()
        failure: Exception | None = None
        while self.next_id < goal:
            if time.monotonic() - shown > _SILENT_SECONDS:
                shown = time.monotonic()
                self.inform(
                    f"{self.name}: has read {self.next_id.index} of {goal.index} batches "
                    "again, to return to its position"
                )
            try:
                if again:
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
                    if again:
                        raise

    # -- reading again after failures in the network --------------------------------------------

    def _read_patiently(self) -> AnyBatch:
        """Reads the next batch, see `_read`, and reads it again after failures in the network."""
        if self._retries is None:
            return self._read()
        which, had_begun = self.next_id, self._batches is not None
        states = None
        if which.index == 0 or self._reader.draws:
            states = random_states()
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
        go_back = self._way_back_to(which, had_begun=had_begun)
        return self._read_again(which, failure, go_back, states or random_states(), self._retries)

    def _read_again(
        self,
        which: BatchId,
        failure: Exception,
        go_back: Callable[[], object] | None,
        states: RandomStates,
        retries: ReadRetries,
    ) -> AnyBatch:
        """Reads a batch again that a failure in the network has interrupted.

        The loader and the random states are moved back to the batch before each attempt. If that is
        impossible, the failure is raised. Without this, the batch would be lost, or the end of a
        generator that has raised would pass for the end of the data.

        Args:
            which: the batch that could not be read.
            failure: the exception of the read.
            go_back: result of `_way_back_to`.
            states: random states of before the read.
            retries: waits before each attempt, and says when to give up.
        """
        if go_back is None:
            failure.add_note(
                f"healcore: {self.name} cannot be moved back to {which}, so the batch is not read "
                "again. Pass a function that makes it, healer.batches(lambda: ...), which healcore "
                "calls again after a failure in the network"
            )
            raise failure
        reader, last = self._reader, self.last_id
        self.unreadable = which
        reader.reads_again = True
        try:
            while retries.wait_after(failure):
                try:
                    go_back()
                    self.next_id = which
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
                    retries.report_success()
                    self.unreadable = None
                    return batch
            raise failure
        finally:
            self.last_id = last
            reader.reads_again = False
            if self.unreadable is not None:  # also if a signal has ended the wait
                self.next_id = BatchId(which.epoch, which.index + 1)
                self._error = failure

    def _way_back_to(self, which: BatchId, *, had_begun: bool) -> Callable[[], object] | None:
        """Finds how to move the loader back to a batch that has raised.

            the loader                                            way back
            ----------------------------------------------------  ------------------------------
            can be rewound, and the batch is the epoch's first    begins the epoch again
            can be rewound, and a position before it is known     moves to the position
            anything else                                         None

        Args:
            which: the batch that could not be read.
            had_begun: whether the epoch had begun before the read.

        Returns:
            A function that moves back, or None if that is impossible.
        """
        reader = self._reader
        if not self.can_rewind or not reader.can_read_again(which.index):
            return None

        def begin_again() -> None:
            self.next_id = which
            self._drop()
            if had_begun:  # it draws its numbers again first, from the states that it had
                set_random_states(self._begin_states)
                self._begin()

        if which.index == 0 and reader.begins_again:
            return begin_again
        position = self.position_before(which)
        if position is None:
            return None

        def move_back() -> None:
            self._move_to(decode_position(position))
            if self.next_id.epoch < which.epoch:  # the position is at the end of the epoch before
                with suppress(StopIteration):
                    self._read()

        return move_back

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

    def _forget_state(self, obstacle: RewindObstacle) -> None:
        """Treats the loader as a loader that cannot be rewound from now on."""
        self._reader_or_none = LoaderAdapter(self.loader, obstacle=obstacle)

    def position(self) -> SavedPosition:
        """The position right after the last batch, for `rewind` and `fast_forward`.

        If the loader's state cannot be taken, the cursor cannot be rewound from then on.

        Returns:
            Python values that any checkpoint can hold.
        """
        if self.can_rewind and not self._positions:
            self._begin()  # an exception of iter() propagates, as in a loop without healcore
        try:
            # Beginning the next epoch for its state would read ahead.
            is_between = self._phase is EpochPhase.BETWEEN
            if self.can_rewind and not is_between:
                self._begin()
            position = self._saved(self.next_id, self._reader.state(ended=is_between))
        except Exception as error:  # the loader's code may raise anything
            reason = f"the state of {self.name} cannot be taken"
            self._forget_state(RewindObstacle(reason, error_text(error)))
            position = self._saved(self.next_id, None)
        if self.can_rewind:
            self._positions.append(position)
        return position

    def _saved(self, batch: BatchId, state: Any) -> SavedPosition:
        """A position with the state of the loader before a batch, or None."""
        number = self._sampler_epochs.number(batch.epoch)
        return encode_position(self._reader.kind, batch, state, number, division(self.loader))

    def position_before(self, batch: BatchId) -> SavedPosition | None:
        """The position before a batch that was read, or None if it cannot be reached.

        If the loader's state before the batch is unknown, the position has an earlier state of the
        same epoch and the number of batches since then:

            batches     0   1   2   3   4   5   6   7
            positions       p           q

            before 3    p, and 2 batches to read and drop
            before 6    q, and 2 batches to read and drop

        A position at the start of the epoch serves only for its first batch: the order of the epoch
        may be drawn when that batch is read, after the position was taken.

        Args:
            batch: a batch that was read, or the next batch.
        """
        if batch == self.next_id:
            return self.position()
        if not self.can_rewind:
            return self._saved(batch, None)
        end = self._last_end
        if batch.index == 0 and end is not None and end.epoch == batch.epoch - 1:
            batch = end
        if batch.epoch == self.next_id.epoch:
            state = self._reader.state_before(batch.index)
            if state is not None:
                return self._saved(batch, state)
        for position in reversed(self._positions):
            known = place_of(position)
            if known == batch or (known.epoch == batch.epoch and 0 < known.index < batch.index):
                behind = position["behind"] + batch.index - known.index
                return {**position, "index": batch.index, "behind": behind}
        return None

    def rewind(self, position: Mapping[str, Any]) -> bool:
        """Moves to a position, backwards or forwards, also into another epoch.

        Batches keep their ids, and batches that are skipped stay skipped. No failure leaves the
        loader at an unknown place without an exception:

            decode the position ── fails ──► False, nothing has moved
                    │
            take the current position
                    │
            move to the position ── fails ── move back ── fails ──► DataError
                    │                            └────────────────► False, at the old place
            forget later positions ──► True

        Args:
            position: result of `position` in this process or an earlier process.

        Returns:
            False if the cursor could not move; `rewind_obstacle` has the reason.

        Raises:
            DataError: the loader failed on the position and could not return to the old position.
        """
        if not self.can_rewind:
            return False
        try:
            target = self._decoded(position)
        except DataError as error:
            self._rewind_error = RewindObstacle(str(error))
            return False
        kind = self._reader.kind
        if target.kind != kind:
            self._rewind_error = RewindObstacle(
                f"the position is of kind {target.kind!r}, and the run has another loader now",
                f"{self.name} is of kind {kind!r}",
            )
            return False
        before = self.position()
        if not self.can_rewind:
            return False
        try:
            self._move_to(target)
        except Exception as error:  # the loader's code may raise anything
            reason = f"{self.name} does not accept the position"
            self._rewind_error = RewindObstacle(reason, error_text(error))
            try:
                self._move_to(decode_position(before))
            except Exception:
                raise DataError(
                    f"{self.name} can continue neither from the new position nor from the old: "
                    f"{error_text(error)}"
                ) from error
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
        if goal.epoch > self.next_id.epoch:
            self._sampler_epochs.restore(goal.epoch, target.told_epoch)
            self._drop()
            self.next_id = BatchId(goal.epoch, 0)
        if goal <= self.next_id:
            return ""
        first = self.next_id.index
        with suppress(StopIteration):
            self._drop_until(goal)
        if self.next_id != goal:
            return f"epoch {goal.epoch} has fewer than {goal.index} batches: continues after it"
        order = "a loader that shuffles by itself may give different batches"
        if self._rewind_error is not None:
            order = f"the batches may differ from before: {self._rewind_error}"
        return (
            f"read {counted(goal.index - first, 'batch', 'batches')} and dropped them, up to batch "
            f"{goal.index} of epoch {goal.epoch}; {order}"
        )

    def _decoded(self, position: Any) -> Position:
        """A position for this loader. Raises DataError, also if its batch has other rows here."""
        target = decode_position(position)
        check_division(target, division(self.loader), self.name)
        return target

    def _move_to(self, target: Position) -> None:
        """Moves the loader to a position. If the loader raises, its position is unknown."""
        epoch, index = target.batch
        self.next_id, self.last_id = BatchId(epoch, 0), None  # a function may ask for the epoch
        self._sampler_epochs.restore(epoch, target.told_epoch)
        self._batches, self._phase = None, EpochPhase.BETWEEN
        behind = target.behind
        if target.state is not None:
            self._batches, behind = self._reader.resume(target.state, behind)
            self._phase = EpochPhase.RESTORED
        self.next_id = BatchId(epoch, index - behind)
        self._drop_until(target.batch)
        self._error = None


def _check_iterable(loader: AnyLoader) -> None:
    """Raises UnusableLoader for an object that is nothing to iterate over."""
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not is_iterable or isinstance(loader, type):
        raise UnusableLoader(
            f"a loader is something to iterate over, not {loader!r:.80}: pass a DataLoader, a "
            "dataset of batches, a list, or a function that makes one of these"
        )
