"""The data cursor, which yields batches with permanent ids and rewinds if the loader can."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from healcore.console import counted
from healcore.runtime.data import position as positions
from healcore.runtime.data.epoch_reader import EpochReader
from healcore.runtime.data.position import BatchId, DataError

Batch = TypeVar("Batch", covariant=True)


_MAX_POSITIONS = 4
"""Number of recent positions that `position_before` can start from."""


class UnusableLoader(DataError, TypeError):
    """The object is no loader, or has fewer epochs than requested."""


class Indexed(Protocol[Batch]):
    """Batches by index, as in a torch Dataset."""

    def __getitem__(self, index: int, /) -> Batch:
        """The batch at an index; IndexError after the last one."""
        ...


Loader = Iterable[Batch] | Indexed[Batch]


class Cursor:
    """Reads a loader, epoch after epoch. Nothing is read ahead.

    Beginning an epoch may draw random numbers (torch loaders do), and `position`, `rewind` and
    `next` may begin an epoch. So take the position before the random state, and restore them in
    that order.

    Args:
        loader: any object that can be iterated over.
        epochs: number of epochs, or None for no end. An iterator has one epoch.

    Raises:
        UnusableLoader: the loader cannot be iterated over, or has fewer epochs.
        DataError: `epochs` is not a whole number >= 1.
    """

    def __init__(self, loader: Loader[Any], *, epochs: int | None = 1) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise UnusableLoader(
                f"a loader is something to iterate over, not {loader!r:.80}: "
                "pass a DataLoader, a dataset of batches or a list"
            )
        self._reader = EpochReader(loader)
        self._ids_to_skip: frozenset[BatchId] = frozenset()
        self._skipped: list[BatchId] = []
        self._rewind_error: str | None = None
        self._recent_positions: deque[tuple[BatchId, dict[str, Any]]] = deque(maxlen=_MAX_POSITIONS)
        """The last positions, oldest first, with the ids of their next batches. After a first call
        of `position` each epoch adds one. Empty for loaders that are read by index."""
        self.unreadable: BatchId | None = None
        """The batch whose reading made the last `next` raise, or None."""
        self._until: int | None = 0
        self.extend(epochs)

    def extend(self, epochs: int | None = 1) -> None:
        """Allows further epochs, for programs that call `next` within their own `for epoch` loop.

        After a rewind into an earlier epoch, `next` finishes that epoch first. After a resume in a
        later epoch, `next` ends at once until the outer loop has reached that epoch.

        Args:
            epochs: number of epochs, or None for no end.

        Raises:
            UnusableLoader, DataError: as for a new cursor.
        """
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if self._reader.single_epoch and epochs is not None and epochs > 1:
            raise UnusableLoader(
                f"{self._reader.name} is an iterator and has one epoch, not {epochs}: pass "
                "the loader that created it, or epochs=1"
            )
        if epochs is None or self._until is None:
            self._until = None
        else:
            self._reader.requested_epoch = self._until
            self._until += epochs

    def read_only(self, epoch: int) -> None:
        """Makes `next` end after this epoch, which is the epoch of the program's own loop.

        Raises:
            DataError: the loader is in a later epoch, or has not begun the epoch before.
        """
        at, length = self._reader.next_id, self._reader.length
        ended = at.index > 0 and (length is None or self.is_last(length))
        if at == BatchId(0, 0):
            self._reader.epoch = epoch  # the loader is used for the first time
        elif at.epoch != epoch and not (at.epoch == epoch - 1 and ended):
            raise DataError(
                f"epoch {epoch} cannot be the next epoch of {self._reader.name}, which is at batch "
                f"{at.index} of epoch {at.epoch}: write `for epoch in healer.epochs(n)`, and "
                "healer.batches(loader, epoch=epoch) once in each epoch"
            )
        self._reader.requested_epoch, self._until = epoch, epoch + 1

    @property
    def before_end(self) -> bool:
        """Whether the loader stands within an epoch that the loop does not reach."""
        epoch, index = self._reader.next_id
        return self._until is not None and epoch >= self._until and index > 0

    @property
    def can_rewind(self) -> bool:
        """Whether the loader can be rewound."""
        return self._reader.adapter.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why the loader cannot be rewound, or why the last `rewind` failed, or None."""
        return self._reader.adapter.why_not or self._rewind_error

    def next(self, *, after: Exception | None = None) -> tuple[Any, BatchId]:
        """The next batch that is not skipped, and its id.

        Exceptions of the loader propagate, with the batch's id as a note. The batch counts as read,
        and the next call continues after it if the loader can. An exception at a skipped batch is
        ignored, unless it ends the loader before the end of the epoch, as in a generator.

        Args:
            after: the exception of the last call, which is raised again if it has ended the loader.

        Raises:
            StopIteration: there are no more epochs.
            EmptyLoader: an epoch has no batch.
        """
        reader, self.unreadable = self._reader, None
        while not reader.exhausted and (self._until is None or reader.epoch < self._until):
            reader.begin()  # an exception of iter() belongs to no batch
            which = reader.next_id
            skipped = which in self._ids_to_skip
            try:
                batch = reader.read()
            except StopIteration:
                if after is not None and reader.has_batch(which.index):
                    after.add_note(
                        f"healcore: {reader.name} has ended with this error, as a generator does: "
                        "there is no batch after it to continue with"
                    )
                    raise after from None
                continue
            except DataError:
                raise
            except Exception as error:
                if not skipped:
                    self.unreadable = which
                    raise
                after = error
            else:
                # The epoch's order may be drawn when its first batch is read.
                if self._recent_positions and self._recent_positions[-1][0] < BatchId(
                    which.epoch, 1
                ):
                    self.position()
                if not skipped:
                    return batch, which
                after = None
            self._skipped.append(which)
        raise StopIteration

    @property
    def at_end(self) -> bool:
        """Whether all batches of all epochs are read. False if the loader has no length."""
        if self._until is None or self._reader.epoch != self._until - 1:
            return False
        length = self._reader.length
        return length is not None and self.is_last(length)

    def left_at(self) -> str:
        """The place where a `break` left the loop, as part of a sentence.

        Empty at the end, without a number of epochs, or without a length of the loader.
        """
        (epoch, index), length = self._reader.next_id, self._reader.length
        if length is None or self._until is None or epoch >= self._until or self.at_end:
            return ""
        return f"a `break` in epoch {epoch}, before batch {index} of {length},"

    def is_last(self, length: int) -> bool:
        """Whether the epoch, which has `length` batches, is exhausted.

        Skipped batches do not count. Call it between two batches.
        """
        epoch, index = self._reader.next_id
        return all(BatchId(epoch, i) in self._ids_to_skip for i in range(index, length))

    def abandon(self) -> None:
        """Drops the rest of the epoch, after a `break`."""
        self._reader.abandon()

    def position(self) -> dict[str, Any]:
        """The position right after the last batch, for `rewind` and `fast_forward`.

        It consists of Python values that any checkpoint can hold. If the loader's state cannot be
        taken, the cursor cannot rewind from then on.
        """
        try:
            position = self._encoded()
        except Exception as error:  # the loader's code may raise anything
            self._reader.disable_rewind(error)
            return self._encoded()
        if not self._reader.adapter.by_index:
            self._recent_positions.append((self._reader.next_id, position))
        return position

    def position_before(self, batch: BatchId) -> dict[str, Any] | None:
        """The position before a batch that was read, or None if it cannot be reached.

        If the loader's state before the batch is unknown, the position has an earlier state of the
        same epoch and the number of batches to read again and drop.
        """
        reader = self._reader
        if batch == reader.next_id:
            return self.position()
        if reader.adapter.by_index:
            position = reader.position_by_index(batch)
            return positions.encode(position, self._ids_to_skip, division=reader.division)
        if batch.index == 0 and reader.ended is not None and reader.ended.epoch == batch.epoch - 1:
            batch = reader.ended  # the next epoch's order may be drawn when it begins
        for known, position in reversed(self._recent_positions):
            if known == batch or (known.epoch == batch.epoch and 0 < known.index < batch.index):
                behind = position.get("behind", 0) + batch.index - known.index
                skipped = positions.ids_from(batch, self._ids_to_skip)
                return {**position, "index": batch.index, "behind": behind, "left_out": skipped}
        return None

    def rewind(self, position: Mapping[str, Any]) -> bool:
        """Moves to a position, backwards or forwards, also into another epoch.

        Batches keep their ids. Batches that are skipped now stay skipped.

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
            self._check_division(position)
            target, skipped = positions.decode(position)
        except DataError as error:
            self._rewind_error = str(error)
            return False
        name, kind = self._reader.name, self._reader.adapter.kind
        if target.kind != kind:
            self._rewind_error = (
                f"the position is of kind {target.kind!r}, and {name} is of kind {kind!r}: the run "
                "has another loader now"
            )
            return False
        before = self.position()
        if not self.can_rewind:
            return False
        try:
            self._reader.restore(target)
            while self._reader.next_id < BatchId(target.epoch, target.index):
                self._drop()
        except Exception as error:  # the loader's code may raise anything
            self._rewind_error = f"{name} does not accept the position: {_text(error)}"
            self._return_to(before, error)
            return False
        self._recent_positions.clear()
        if not self._reader.adapter.by_index:
            self._recent_positions.append((self._reader.next_id, dict(position)))
        self._ids_to_skip |= skipped
        self._rewind_error = None
        return True

    def fast_forward(self, position: Mapping[str, Any]) -> str:
        """Moves forward by reading and dropping batches, for loaders without a state.

        Args:
            position: as in `rewind`. Earlier epochs are not read again.

        Returns:
            A sentence about the batches that were dropped.

        Raises:
            DataError: it is no position, or the batches differ for this number of ranks.
        """
        self._check_division(position)
        target, skipped = positions.decode(position)
        self._ids_to_skip |= skipped
        goal = BatchId(target.epoch, target.index)
        if goal <= self._reader.next_id:
            return f"batch {goal.index} of epoch {goal.epoch} is not ahead: nothing was dropped"
        if goal.epoch > self._reader.epoch:
            self._reader.jump(target)
        reached = first = self._reader.index
        try:
            while reached < goal.index:
                self._drop()
                reached += 1
        except StopIteration:
            batches = counted(reached, "batch", "batches")
            return (
                f"epoch {goal.epoch} has only {batches}: continues after it, not at batch "
                f"{goal.index}"
            )
        batches = counted(reached - first, "batch", "batches")
        return (
            f"read {batches} and dropped them, up to batch {goal.index} of epoch {goal.epoch}; a "
            "DistributedSampler gives the same batches again, a loader that shuffles by itself may "
            "give different batches"
        )

    @property
    def left_out(self) -> frozenset[BatchId]:
        """Ids of the skipped batches, before and after the current position."""
        return self._ids_to_skip

    def leave_out(self, ids: Iterable[BatchId]) -> None:
        """Skips batches when the cursor reaches them; `skipped` then lists them.

        Args:
            ids: batch ids, or pairs. Ids after the end of an epoch have no effect on the next
                epoch.

        Raises:
            DataError: a value is no batch id.
        """
        self._ids_to_skip |= positions.checked_ids(ids)

    def read_again(self, ids: Iterable[BatchId]) -> None:
        """Inverse of `leave_out`."""
        self._ids_to_skip -= positions.checked_ids(ids)

    def skipped(self) -> list[BatchId]:
        """Ids of the batches skipped since the last call, in order."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _drop(self) -> None:
        """Reads and discards a batch. An unreadable batch also counts as read."""
        try:
            self._reader.read()
        except (StopIteration, DataError):
            raise
        except Exception:
            return

    def _check_division(self, position: Any) -> None:
        if isinstance(position, Mapping):
            positions.check_division(position, self._reader.division, self._reader.name)

    def _encoded(self) -> dict[str, Any]:
        reader = self._reader
        return positions.encode(reader.position(), self._ids_to_skip, division=reader.division)

    def _return_to(self, before: Any, error: Exception) -> None:
        try:
            self._reader.restore(positions.decode(before)[0])
        except Exception:
            raise DataError(
                f"{self._reader.name} can continue neither from the new position nor from the old: "
                f"{_text(error)}"
            ) from error


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
