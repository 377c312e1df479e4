"""The data cursor, which yields batches with permanent ids and rewinds if the loader can."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from healcore.console import counted
from healcore.core.decision import Cause
from healcore.core.errors import error_text
from healcore.runtime.data.function_loader import FunctionLoader, function_name, is_function
from healcore.runtime.data.loader_adapters import (
    BatchId,
    DataError,
    EmptyLoader,
    Loader,
    LoaderAdapter,
    Position,
    UnreadableBatch,
    UnusableLoader,
    adapter_for,
    check_division,
    class_name,
    decode_position,
    encode_position,
)
from healcore.runtime.data.random_states import random_states, set_random_states
from healcore.runtime.data.torch_loader import SamplerEpochs, TorchLoader, division, is_replayable
from healcore.runtime.faults.failures import classify

T = TypeVar("T")

_MAX_POSITIONS = 4  # that `position_before` can start from
_SILENT_SECONDS = 5.0  # of reading and dropping batches, before the first line of progress


class ReadRetries(Protocol):
    """The attempts to read a batch, which `healcore.runtime.faults.retry.Retries` implements."""

    def wait_after(self, error: BaseException) -> bool:
        """Waits after a failed attempt. Returns whether to read again."""
        ...

    def report_success(self) -> None:
        """Reports a success after failures."""


class Cursor:
    """Reads a loader, epoch after epoch. Nothing is read ahead.

    An epoch begins when its first batch or its state is needed. Beginning an epoch may draw random
    numbers (torch loaders do), and `position`, `rewind` and `next` may begin an epoch. So take the
    position before the random state, and restore them in that order.

    Args:
        loader: any object that can be iterated over, or a function without arguments that makes
            one, see `function_loader`.
        epochs: number of epochs, or None for no end. An iterator has one epoch.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        loader: the loader.
        next_id: the id of the next batch.
        skipped_batch_ids: ids of the batches to skip, also before the current position.
        inform: called with lines about the progress of a long read.
        limit: number of batches after which an epoch ends, or None for all batches.
        unreadable: the batch whose reading made the last `next` raise, or None.
        put_back_random_states: sets the random states of before the next `next`, or None if only
            the cursor can keep them.

    Raises:
        UnusableLoader: the loader cannot be iterated over, or has fewer epochs.
        DataError: `epochs` is not a whole number >= 1.
    """

    def __init__(
        self, loader: Loader[Any], *, epochs: int | None = 1, retries: ReadRetries | None = None
    ) -> None:
        is_made = is_function(loader)
        iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if not is_made and (not iterable or isinstance(loader, type)):
            raise UnusableLoader(
                f"a loader is something to iterate over, not {loader!r:.80}: pass a DataLoader, a "
                "dataset of batches, a list, or a function that makes one of these"
            )
        self.loader: Any = loader
        self.next_id = BatchId(0, 0)
        self.last_id: BatchId | None = None
        self.skipped_batch_ids: set[BatchId] = set()
        self.limit: Callable[[int], int] | None = None
        self.unreadable: BatchId | None = None
        self.inform: Callable[[str], object] = lambda line: None
        self.put_back_random_states: Callable[[], object] | None = None
        self._retries = retries
        self._states_of_begin: dict[str, Any] = {}  # random states before this epoch has begun
        self._reads_again = False  # whether a batch is read once more after a failure
        self._is_made = is_made
        self._name = f"function {function_name(loader)}" if is_made else class_name(loader)
        self._sampler_epochs = SamplerEpochs(loader)
        self._batches: Iterator[Any] | None = None  # the rest of the epoch, once it has begun
        self._between_epochs = False  # whether an epoch has ended, and the next one has not begun
        self._epoch_restored = False  # whether the epoch was restored from a state
        self._exhausted = False  # whether the only epoch of an iterator has ended
        self._last_end: BatchId | None = None  # after the last batch of the last complete epoch
        self._error: Exception | None = None  # of the last read
        self._rewind_error: str | None = None
        self._skipped: list[BatchId] = []
        # The last positions, oldest first, with the ids of their next batches. After a first call
        # of `position` each epoch adds one.
        self._captures: deque[tuple[BatchId, dict[str, Any]]] = deque(maxlen=_MAX_POSITIONS)
        self._requested_epoch: float = 0  # the epoch that the user's loop requested last
        self._end_epoch: float = 0  # `next` ends before this epoch; infinity for no end
        self.extend(epochs)

    @functools.cached_property
    def _adapter(self) -> LoaderAdapter:
        """Created on first use, because that may begin an epoch."""
        loader = self.loader
        if self._is_made:
            return FunctionLoader(loader)
        if is_replayable(loader):
            return TorchLoader(loader)
        return self._begun_patiently(lambda: adapter_for(loader))

    # -- epochs ---------------------------------------------------------------------------------

    def extend(self, epochs: int | None = 1) -> None:
        """Allows further epochs, for programs that call `next` within their own `for epoch` loop.

        After a rewind into an earlier epoch, `next` finishes that epoch first. After a resume in a
        later epoch, `next` ends at once until the outer loop has reached that epoch.
        """
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if isinstance(self.loader, Iterator) and epochs is not None and epochs > 1:
            raise UnusableLoader(
                f"{self._name} is an iterator and has one epoch, not {epochs}: pass "
                "the loader that created it, or epochs=1"
            )
        if epochs is None:
            self._end_epoch = math.inf
        elif self._end_epoch < math.inf:
            self._requested_epoch = self._end_epoch
            self._end_epoch += epochs

    def read_only(self, epoch: int, *, resumes: bool = False) -> None:
        """Makes `next` end after this epoch, which is the epoch of the program's own loop.

        If an earlier process was saved in this epoch (`resumes`), the epoch may have been read
        already, or a rollback may have led into the epoch before.

        Raises:
            DataError: the loader is in a later epoch, or has not begun the epoch before.
        """
        at = self.next_id
        ended = at.index > 0 and (self.length is None or self.is_last())
        if at == BatchId(0, 0):
            self.next_id = BatchId(epoch, 0)  # the loader is used for the first time
        elif not resumes and at.epoch != epoch and not (at.epoch == epoch - 1 and ended):
            raise DataError(
                f"epoch {epoch} cannot be the next epoch of {self._name}, which is at batch "
                f"{at.index} of epoch {at.epoch}: write `for epoch in healer.epochs(n)`, and "
                "healer.batches(loader, epoch=epoch) once in each epoch"
            )
        self._requested_epoch, self._end_epoch = epoch, epoch + 1

    def end_before(self, epoch: int) -> None:
        """Makes `next` end before this epoch, from which the program's own loop goes on.

        Call it after a rewind, if the loop returns to the epoch of the new position.
        """
        if self._end_epoch < math.inf:
            self._end_epoch = epoch

    @property
    def length(self) -> int | None:
        """Number of batches in the epoch, or None if the loader has no length."""
        limit = None if self.limit is None else self.limit(self.next_id.epoch)
        try:
            length = len(self.loader)
        except TypeError:
            return limit
        return length if limit is None else min(length, limit)

    def is_last(self) -> bool:
        """Whether the epoch is exhausted. False if the loader has no length.

        Skipped batches do not count. Call it between two batches.
        """
        (epoch, index), length = self.next_id, self.length
        if length is None:
            return False
        return all(BatchId(epoch, i) in self.skipped_batch_ids for i in range(index, length))

    @property
    def at_end(self) -> bool:
        """Whether all batches of all epochs are read. False if the loader has no length."""
        return self.next_id.epoch == self._end_epoch - 1 and self.is_last()

    @property
    def beyond_last_epoch(self) -> bool:
        """Whether the loader stands within an epoch that the loop does not reach."""
        epoch, index = self.next_id
        return epoch >= self._end_epoch and index > 0

    @property
    def break_place(self) -> str:
        """The place, if a `break` here leaves batches, or "" (also without epochs or a length)."""
        (epoch, index), length = self.next_id, self.length
        if not epoch < self._end_epoch < math.inf or length is None or self.at_end:
            return ""
        return f"a `break` in epoch {epoch}, before batch {index} of {length},"

    def abandon(self) -> None:
        """Drops the rest of the epoch, after a `break`; the next batch is of the next epoch."""
        if self.next_id.index > 0 and not isinstance(self.loader, Iterator):
            self.next_id = BatchId(self.next_id.epoch + 1, 0)
            # Not between two epochs: the loader's own state still belongs to this epoch.
            self._batches, self._between_epochs = None, False

    def close(self) -> None:
        """Releases the loader's iterator with its workers. Nothing can be read afterwards."""
        self._batches = None
        self._adapter = LoaderAdapter(self.loader, why_not=f"{self._name} is closed")

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
        while not self._exhausted and self.next_id.epoch < self._end_epoch:
            self._begin()  # an exception of iter() belongs to no batch
            which = self.next_id
            error = self._error
            try:
                batch = self._read_patiently()
            except StopIteration:
                if error is not None and (self.length is None or which.index < self.length):
                    error.add_note(
                        f"healcore: {self._name} has ended with this error, as a generator does: "
                        "there is no batch after it to continue with"
                    )
                    raise error from None
                continue
            except DataError:
                raise
            except Exception:
                self.unreadable = None if which in self.skipped_batch_ids else which
                if self.unreadable is not None:
                    raise
            else:
                # The epoch's order may be drawn when its first batch is read.
                if self._captures and self._captures[-1][0] < (which.epoch, 1):
                    self.position()
                if which not in self.skipped_batch_ids:
                    self.last_id = which
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
            epoch = self.next_id.epoch
            self._sampler_epochs.begin(epoch, by_user=epoch == self._requested_epoch)
            self._between_epochs = self._epoch_restored = False
            start = self._adapter.start_again if self._reads_again else self._adapter.start
            if self._retries is not None:
                self._states_of_begin = random_states()
            self._batches = self._begun_patiently(lambda: start(epoch))
        return self._batches

    def _begun_patiently(self, begin: Callable[[], T]) -> T:
        """Calls a function that begins to read, and calls it again after failures in the network.

        Each call begins with the random states of the first, because it may draw an order.
        """
        if self._retries is None or self._reads_again:
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

    def _read_patiently(self) -> Any:
        """Reads the next batch, see `_read`, and reads it again after failures in the network."""
        which, begun = self.next_id, self._batches is not None
        if self._retries is None:
            return self._read()
        put_back, self.put_back_random_states = self.put_back_random_states, None
        if put_back is None and (which.index == 0 or self._adapter.draws):
            put_back = functools.partial(set_random_states, random_states())
        try:
            return self._read()
        except StopIteration:
            raise
        except Exception as error:
            if classify(error).cause is not Cause.NETWORK:
                raise
            failure = error
        # Outside of the block: an error of the next attempt must not have this one as its context,
        # or it would be classified as a failure in the network too.
        if put_back is None:  # reading draws no numbers: the states are those of before the read
            put_back = functools.partial(set_random_states, random_states())
        go_back = self._way_back_to(which, put_back, begun=begun)
        return self._read_again(which, failure, self._retries, go_back)

    def _read_again(
        self,
        which: BatchId,
        failure: Exception,
        retries: ReadRetries,
        go_back: Callable[[], object] | None,
    ) -> Any:
        """Reads a batch again that a failure in the network has interrupted.

        The loader is moved back to the batch, and so are the random states, so that the batch is
        the one that the failure has prevented. If that is impossible, the failure is raised: to
        read on would lose the batch, or would take the end of a generator that has raised for the
        end of the data.

        Args:
            which: the batch.
            failure: the exception.
            retries: the attempts.
            go_back: result of `_way_back_to`.
        """
        if go_back is None:
            failure.add_note(
                f"healcore: {self._name} cannot be moved back to {which}, so the batch is not read "
                "again. Pass a function that makes it, healer.batches(lambda: ...), which healcore "
                "calls again after a failure in the network"
            )
            raise failure
        adapter, last = self._adapter, self.last_id
        self.unreadable, self._reads_again, adapter.reads_again = which, True, True
        try:
            while retries.wait_after(failure):
                try:
                    go_back()
                    batch = self._read()
                except (StopIteration, EmptyLoader):
                    failure.add_note(
                        f"healcore: after this error {self._name} has ended before {which}"
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
            self.last_id, self._reads_again, adapter.reads_again = last, False, False
            if self.unreadable is not None:  # also if a signal has ended the wait
                self.next_id = BatchId(which.epoch, which.index + 1)
                self._error = failure

    def _way_back_to(
        self, which: BatchId, put_back: Callable[[], object], *, begun: bool
    ) -> Callable[[], object] | None:
        """Moves loader and random states back to a batch that has raised, or None if impossible.

        Args:
            which: the batch.
            put_back: sets the random states of before the read that has raised.
            begun: whether the epoch had begun before this read.
        """
        adapter, batches = self._adapter, self._batches
        states_of_begin = self._states_of_begin

        def stay() -> None:
            assert batches is not None
            adapter.stay(batches)
            put_back()
            self.next_id = which

        def begin_epoch() -> None:
            self.next_id, self._batches, self._between_epochs = which, None, False
            if begun:  # the draws of its begin belong before the states of the read
                set_random_states(states_of_begin)
                self._begin()
            put_back()

        def move_back() -> None:
            assert position is not None
            self._return_to(which, position)
            put_back()

        if not self.can_rewind:
            return stay if batches is not None and adapter.stay(batches) else None
        if not adapter.can_read_again(which.index):
            return None
        if which.index == 0 and adapter.begins_again:
            return begin_epoch
        position = self.position_before(which)
        return None if position is None else move_back

    def _return_to(self, which: BatchId, position: Mapping[str, Any]) -> None:
        """Moves back to a position before `which`, also at the end of the epoch before."""
        self._restore(self._decoded(position))
        if self.next_id.epoch < which.epoch:
            with suppress(StopIteration):
                self._read()
        self.next_id = which

    def _read(self) -> Any:
        """Reads the next batch; StopIteration after an epoch, EmptyLoader if it had no batch."""
        batches = self._begin()
        which = self.next_id
        following = BatchId(which.epoch, which.index + 1)
        self._error = None
        if self.limit is not None and which.index >= self.limit(which.epoch) > 0:
            self._last_end = which
            self.abandon()
            raise StopIteration
        try:
            batch = next(batches)
            if isinstance(batch, UnreadableBatch):
                raise batch.error
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            which.rows = self._adapter.rows()
            error.add_note(f"healcore: reading {which}")
            self._error, self.next_id = error, following  # torch loaders continue after it
            raise
        which.rows = self._adapter.rows()
        self.next_id = following
        return batch

    def _end(self) -> None:
        epoch, index = self.next_id
        if index == 0 and not self._epoch_restored:
            raise EmptyLoader(epoch, self._name)
        if isinstance(self.loader, Iterator):
            self._exhausted = True
            return
        # A state between two epochs may restore the end of the first. Then this epoch begins again.
        if index > 0:
            self._last_end, self.next_id = self.next_id, BatchId(epoch + 1, 0)
        self._batches, self._between_epochs = None, True

    def _drop_until(self, goal: BatchId) -> None:
        """Reads and discards batches. An unreadable batch also counts as read.

        A stream that ends with a failure in the network raises the failure. If the batches are
        dropped to read another one again, the first such failure is raised, which is an attempt.
        """
        shown = time.monotonic()
        failure: Exception | None = None
        while self.next_id < goal:
            if time.monotonic() - shown > _SILENT_SECONDS:
                shown = time.monotonic()
                self.inform(
                    f"{self._name}: has read {self.next_id.index} of {goal.index} batches again, "
                    "to return to its position"
                )
            try:
                if self._reads_again:
                    self._read()
                else:
                    self._read_patiently()
            except StopIteration:
                if failure is not None:
                    raise failure from None
                raise
            except Exception as error:
                if error is not self._error:  # an empty epoch
                    raise
                if classify(error).cause is Cause.NETWORK:
                    failure = error
                    if self._reads_again:
                        raise

    # -- positions ------------------------------------------------------------------------------

    @property
    def can_rewind(self) -> bool:
        """Whether the loader can be rewound."""
        return self._adapter.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why the loader cannot be rewound, or why the last `rewind` failed, or None."""
        return self._adapter.why_not or self._rewind_error

    def position(self) -> dict[str, Any]:
        """The position right after the last batch, for `rewind` and `fast_forward`.

        It consists of Python values that any checkpoint can hold. If the loader's state cannot be
        taken, the cursor cannot rewind from then on.
        """
        if self.next_id == (0, 0) and self.can_rewind:
            self._begin()  # an exception of iter() propagates, as in a loop without healcore
        try:
            # Beginning the next epoch for its state would read ahead.
            if self.can_rewind and not self._between_epochs:
                self._begin()
            state = self._adapter.state(ended=self._between_epochs)
            position = self._encoded(self.next_id, state)
        except Exception as error:  # the loader's code may raise anything
            why_not = f"the state of {self._name} cannot be taken: {error_text(error)}"
            self._adapter = LoaderAdapter(self.loader, why_not=why_not)
            position = self._encoded(self.next_id, None)
        if self.can_rewind:
            self._captures.append((self.next_id, position))
        return position

    def position_before(self, batch: BatchId) -> dict[str, Any] | None:
        """The position before a batch that was read, or None if it cannot be reached.

        If the loader's state before the batch is unknown, the position has an earlier state of the
        same epoch and the number of batches since then.
        """
        if batch == self.next_id:
            return self.position()
        if not self.can_rewind:
            return self._encoded(batch, None)
        if batch.index == 0 and self._last_end and self._last_end.epoch == batch.epoch - 1:
            batch = self._last_end  # the next epoch's order may be drawn when it begins
        same = batch.epoch == self.next_id.epoch
        if same and (state := self._adapter.state_before(batch.index)) is not None:
            return self._encoded(batch, state)
        for known, position in reversed(self._captures):
            if known == batch or (known.epoch == batch.epoch and 0 < known.index < batch.index):
                behind = position["behind"] + batch.index - known.index
                return {**position, "index": batch.index, "behind": behind}
        return None

    def rewind(self, position: Mapping[str, Any]) -> bool:
        """Moves to a position, backwards or forwards, also into another epoch.

        Batches keep their ids, and batches that are skipped stay skipped.

        Args:
            position: result of `position` in this process or an earlier process.

        Returns:
            False if the cursor could not move; `why_not` has the reason.

        Raises:
            DataError: the loader failed on the position and could not return to the old position.
        """
        if not self.can_rewind:
            return False
        try:
            target = self._decoded(position)
            if target.kind != self._adapter.kind:
                raise DataError(
                    f"the position is of kind {target.kind!r}, and the run has another loader now: "
                    f"{self._name} is of kind {self._adapter.kind!r}"
                )
        except DataError as error:
            self._rewind_error = str(error)
            return False
        before = self.position()
        if not self.can_rewind:
            return False
        try:
            self._restore(target)
        except Exception as error:  # the loader's code may raise anything
            self._rewind_error = f"{self._name} does not accept the position: {error_text(error)}"
            try:
                self._restore(decode_position(before))
            except Exception:
                raise DataError(
                    f"{self._name} can continue neither from the new position nor from the old: "
                    f"{error_text(error)}"
                ) from error
            return False
        self._captures.clear()
        self._captures.append((target.batch, dict(position)))
        self._rewind_error = None
        return True

    def fast_forward(self, position: Mapping[str, Any]) -> str:
        """Moves forward by reading and dropping batches, for loaders without a state.

        Earlier epochs are not read again.

        Returns:
            A sentence about the batches that were dropped, or "" if none was.

        Raises:
            DataError: it is no position, or the batches differ for this number of ranks.
        """
        target = self._decoded(position)
        goal = target.batch
        if goal.epoch > self.next_id.epoch:
            self._sampler_epochs.restore(goal.epoch, target.sampler_epoch)
            self._batches, self._between_epochs = None, False
            self.next_id = BatchId(goal.epoch, 0)
        if goal <= self.next_id:
            return ""
        first = self.next_id.index
        with suppress(StopIteration):
            self._drop_until(goal)
        if self.next_id != goal:
            return f"epoch {goal.epoch} has fewer than {goal.index} batches: continues after it"
        batches = counted(goal.index - first, "batch", "batches")
        return (
            f"read {batches} and dropped them, up to batch {goal.index} of epoch {goal.epoch}; a "
            "DistributedSampler gives the same batches again, a loader that shuffles by itself may "
            "give different batches"
        )

    def _restore(self, target: Position) -> None:
        """Moves the loader to a position. If the loader raises, its position is unknown."""
        (epoch, index), behind = target.batch, target.behind
        self.next_id, self.last_id = BatchId(epoch, 0), None  # a function may ask for the epoch
        self._sampler_epochs.restore(epoch, target.sampler_epoch)
        self._batches, self._between_epochs = None, True
        if target.state is not None:
            self._batches, behind = self._adapter.resume(target.state, behind)
            self._epoch_restored, self._between_epochs = True, False
        self._exhausted = False
        self.next_id = BatchId(epoch, index - behind)
        self._drop_until(target.batch)
        self._error = None

    def _decoded(self, position: Any) -> Position:
        target = decode_position(position)
        check_division(position, division(self.loader), self._name)
        return target

    def _encoded(self, batch: BatchId, state: Any) -> dict[str, Any]:
        number = self._sampler_epochs.number(batch.epoch)
        return encode_position(self._adapter.kind, batch, state, number, division(self.loader))
