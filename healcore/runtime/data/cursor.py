"""The data cursor, which yields batches with permanent ids and rewinds if the loader can."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from healcore.console import counted, error_text
from healcore.runtime.data.batch_stream import BatchStream
from healcore.runtime.data.loader_epoch import EpochPhase
from healcore.runtime.data.loader_protocols import AnyBatch, Loader
from healcore.runtime.data.positions import (
    BatchId,
    DataError,
    UnusableLoader,
    decode_position,
)
from healcore.runtime.data.read_retries import ReadRetries
from healcore.runtime.data.rewind_obstacle import RewindObstacle


class Cursor(BatchStream):
    """Reads the epochs of a loader that a loop asks for, skips batches, and moves to positions.

    A loop asks for epochs with `extend`, or for one epoch with `read_only`. `next` then returns
    their batches. How the epochs of the loader begin and end is in `EpochPhase`; how a batch is
    read again after a failure in the network is in `BatchStream`.

    Args:
        loader: any object that can be iterated over, or a function without arguments that makes
            one, see `function_loader`.
        epochs: number of epochs, or None for no end. An iterator has one epoch.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
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
        super().__init__(loader, retries=retries)
        self.skipped_batch_ids: set[BatchId] = set()
        self._skipped: list[BatchId] = []
        """The batches skipped since `take_skipped`."""
        self._rewind_error: RewindObstacle | None = None
        """Why the last `rewind` has failed, or None."""
        self.extend(epochs)

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
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if isinstance(self.loader, Iterator) and epochs is not None and epochs > 1:
            raise UnusableLoader(
                f"{self._epoch.name} is an iterator and has one epoch, not {epochs}: pass "
                "the loader that created it, or epochs=1"
            )
        self._range.extend(epochs)

    def read_only(self, epoch: int, *, resumes: bool = False) -> None:
        """Makes `next` end after this epoch, which is the epoch of the program's own loop.

        Args:
            epoch: number of the epoch, from 0.
            resumes: whether an earlier process was saved in this epoch. The epoch may have been
                read already then, or a rollback may have led into the epoch before.

        Raises:
            DataError: the loader is in a later epoch, or has not begun the epoch before.
        """
        at = self.next_id
        is_at_end = at.index > 0 and (self.length is None or self.is_last())
        follows = at.epoch == epoch - 1 and is_at_end
        if self.is_used_up and at.epoch < epoch:
            follows = True  # no batch is left for this epoch, nor for any other epoch
        if at == BatchId(0, 0):
            self.next_id = BatchId(epoch, 0)  # the loader is used for the first time
        elif not resumes and at.epoch != epoch and not follows:
            raise DataError(
                f"epoch {epoch} cannot be the next epoch of {self._epoch.name}, which is at batch "
                f"{at.index} of epoch {at.epoch}: write `for epoch in healer.epochs(n)`, and "
                "healer.batches(loader, epoch=epoch) once in each epoch"
            )
        self._range.select(epoch)

    def end_before(self, epoch: int) -> None:
        """Makes `next` end before an epoch, from which the program's own loop continues.

        Call it after a rewind, if the loop returns to the epoch of the new position.

        Args:
            epoch: number of the epoch, from 0.
        """
        self._range.end_before(epoch)

    @property
    def is_used_up(self) -> bool:
        """Whether the loader is an iterator that has yielded its last batch."""
        return self._epoch.phase is EpochPhase.EXHAUSTED

    @property
    def length(self) -> int | None:
        """Number of batches in the epoch, or None if the loader has no length.

        The smaller one of the loader's length and `limit`. The loader is asked each time, because a
        program may change it between two epochs.
        """
        limit = None
        if self.limit is not None:
            limit = self.limit(self.next_id.epoch)
        try:
            length = len(self.loader)
        except TypeError:
            return limit
        if limit is None:
            return length
        return min(length, limit)

    def is_last(self) -> bool:
        """Whether the epoch is exhausted. False if the loader has no length.

        Skipped batches do not count. Call it between two batches.
        """
        length = self.length
        if length is None:
            return False
        epoch, index = self.next_id
        for following in range(index, length):
            if (epoch, following) not in self.skipped_batch_ids:
                return False
        return True

    @property
    def at_end(self) -> bool:
        """Whether all batches of all epochs are read.

        False if the loader has no length: its end is known only when it raises StopIteration.
        Skipped batches count as read.
        """
        return self.next_id.epoch == self._range.end - 1 and self.is_last()

    @property
    def beyond_last_epoch(self) -> bool:
        """Whether the loader stands within an epoch that the loop does not reach.

        A program may ask for fewer epochs after a restart than the process that saved the position.
        The position is then in data that the loop does not read.
        """
        epoch, index = self.next_id
        return epoch >= self._range.end and index > 0

    @property
    def break_place(self) -> str:
        """The place at which a `break` would leave batches unread, for a warning.

        Returns:
            A clause with epoch and batch. An empty string if a `break` would leave no batch, or if
            epochs or batches have no known end.
        """
        epoch, index = self.next_id
        length = self.length
        is_within = epoch < self._range.end and self._range.has_end
        if not is_within or length is None or self.at_end:
            return ""
        return f"a `break` in epoch {epoch}, before batch {index} of {length},"

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
        epoch = self._epoch
        while self.next_id.epoch < self._range.end and epoch.phase is not EpochPhase.EXHAUSTED:
            if epoch.batches is None:
                self._begin()  # an exception of iter() belongs to no batch
            which = self.next_id
            error = self._error
            try:
                batch = self._read_patiently()
            except StopIteration:
                if error is not None and (self.length is None or which.index < self.length):
                    error.add_note(
                        f"healcore: {self._epoch.name} has ended with this error, as a generator "
                        "does: there is no batch after it to continue with"
                    )
                    raise error from None
                continue
            except DataError:
                raise
            except Exception:
                if which not in self.skipped_batch_ids:
                    self.unreadable = which
                    raise
                self.unreadable = None
            else:
                # The order of an epoch may be drawn when its first batch is read. A position from
                # before this batch then serves only for this batch, so one after it is taken.
                newest = self._history.newest
                if newest is not None and newest < (which.epoch, 1):
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

    # -- positions ------------------------------------------------------------------------------

    @property
    def rewind_obstacle(self) -> RewindObstacle | None:
        """Why the loader cannot be rewound, or why the last `rewind` failed, or None.

        The log and the report of a rollback name the reason: without a rewind, a rollback restores
        the weights and continues with the next batches.
        """
        return self._epoch.adapter.obstacle or self._rewind_error

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
            target = self._epoch.decode(position)
        except DataError as error:
            self._rewind_error = RewindObstacle(str(error))
            return False
        kind, name = self._epoch.adapter.kind, self._epoch.name
        if target.kind != kind:
            self._rewind_error = RewindObstacle(
                f"the position is of kind {target.kind!r}, and the run has another loader now",
                f"{name} is of kind {kind!r}",
            )
            return False
        before = self.position()
        if not self.can_rewind:
            return False
        try:
            self._restore(target)
        except Exception as error:  # the loader's code may raise anything
            reason = f"{name} does not accept the position"
            self._rewind_error = RewindObstacle(reason, error_text(error))
            try:
                self._restore(decode_position(before))
            except Exception:
                raise DataError(
                    f"{name} can continue neither from the new position nor from the old: "
                    f"{error_text(error)}"
                ) from error
            return False
        self._history.restart_at(target.batch, dict(position))
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
        target = self._epoch.decode(position)
        goal = target.batch
        if goal.epoch > self.next_id.epoch:
            self._epoch.sampler_epochs.restore(goal.epoch, target.sampler_epoch)
            self._epoch.drop()
            self.next_id = BatchId(goal.epoch, 0)
        if goal <= self.next_id:
            return ""
        first = self.next_id.index
        with suppress(StopIteration):
            self._drop_until(goal)
        if self.next_id != goal:
            return f"epoch {goal.epoch} has fewer than {goal.index} batches: continues after it"
        batches = counted(goal.index - first, "batch", "batches")
        order = "a loader that shuffles by itself may give different batches"
        if self._rewind_error is not None:
            order = f"the batches may differ from before: {self._rewind_error}"
        return (
            f"read {batches} and dropped them, up to batch {goal.index} of epoch {goal.epoch}; "
            f"{order}"
        )
