"""`RunLoader`: the cursor of a run's loader, and what the program's loop does with its batches."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from healcore.runtime.data.batch_stream import Inform
from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.function_loader import FunctionLoader
from healcore.runtime.data.loader_protocols import AnyBatch, AnyLoader
from healcore.runtime.data.positions import BatchId, SavedPosition, decode_position
from healcore.runtime.data.read_retries import ReadRetries
from healcore.runtime.data.scan_blocks import ScanBlocks


class BatchUse(Enum):
    """What the loop does with the loader's last batch.

    event                                from            to
    -----------------------------------  --------------  --------------
    `RunLoader.next`                     LEFT_BY_BREAK   WAITING
    `use_batch`: the loop receives it    any             IN_BODY
    `end_use`: the loop asks for more    IN_BODY         WAITING
    `leave_by_break`                     IN_BODY         LEFT_BY_BREAK
    """

    WAITING = "waiting"
    """The loop body has ended, or no batch was read yet. The next batch may be read."""
    IN_BODY = "in body"
    """The loop body runs with the batch. A save now would lose what the body does after it."""
    LEFT_BY_BREAK = "left by break"
    """A `break` has ended the loop body. Further updates on the batch may follow the loop."""


class RunLoader(Cursor):
    """The cursor of a run's loader, and the use of its batches.

    Whether a loop reads the loader (`in_loop`) is independent of `use`: a rollback within the loop
    body rewinds the loader, and the rest of the body still uses the old batch.

        event                                        `in_loop` is then
        -------------------------------------------  -----------------
        a loop begins, or `next` reads a batch       True
        the loop has no further batch                False
        `break`                                      True: the next loop drops the rest of the epoch
        `leave_loop`, such as by a rollback          False: the next loop begins where the loader is

    Args:
        loader: the user's loader.
        epochs: number of epochs to read, or None for no end.
        skipped_batch_ids: ids of the batches to skip. The registry keeps this set too.
        limit: takes the number of an epoch and returns its largest number of batches, or None.
        retries: the attempts to read a batch after failures in the network, or None for one.
        inform: called with lines about the progress of a long read, or None.

    Attributes:
        number: number of the loader, in the order of first use.
        start: the position before the first batch, for checkpoints older than the first use.
        first_epoch: the epoch of the program's loop in which the loader was first used.
        exhausted_before: whether an earlier process has read all epochs.
        is_undone: whether a return to an earlier epoch has undone all of its epochs. The program
            may not make the loader again, so checkpoints lack its position until a loop begins it.
        in_loop: whether a loop reads the loader. A `break` drops the rest of the epoch.
        use: what the loop does with the last batch.
        trains: whether a step has used its batches. After a restart, a loader that trains nothing
            is read from its start.
        pending_ids: ids of the batches since the last step.
        contents: the batches since the last step, if weights are compared.
        substitute: the batch that replaces an unreadable batch, with several ranks.
    """

    def __init__(
        self,
        number: int,
        loader: AnyLoader,
        epochs: int | None,
        skipped_batch_ids: set[BatchId],
        limit: Callable[[int], int] | None,
        *,
        retries: ReadRetries | None,
        inform: Inform | None,
        first_epoch: int,
    ) -> None:
        super().__init__(loader, epochs=epochs, retries=retries)
        if inform is not None:
            self.inform = inform
        self.number = number
        self.limit = limit
        self.skipped_batch_ids = skipped_batch_ids
        self.start: SavedPosition = self.position()
        self.first_epoch = first_epoch
        self.exhausted_before = False
        self.is_undone = False
        self.in_loop = True
        self.use = BatchUse.WAITING
        self.trains = False
        self.pending_ids: list[BatchId] = []
        self.contents: list[Any] = []
        self.substitute: AnyBatch = None

    @property
    def is_scan(self) -> bool:
        """Whether the batches are blocks of `Healer.scan`, which a rollback never skips."""
        return isinstance(self.loader, ScanBlocks)

    @property
    def first_pending(self) -> BatchId | None:
        """The first batch that was read since the last step, also if reading it has raised."""
        if self.pending_ids:
            return self.pending_ids[0]
        return self.unreadable

    def begin_loop(self, epochs: int | None) -> None:
        """Begins another loop over the loader. Drops the rest of an epoch that a `break` has left.

        Args:
            epochs: number of further epochs, or None for no end.
        """
        self.extend(epochs)
        if self.in_loop:
            self.abandon()
        self.exhausted_before = self.is_undone = False
        self.in_loop = True

    def call_again(self) -> None:
        """Makes the next batch call the loader again, if it is a function that makes a stream.

        A rollback to before the first batch happens in the body of a later epoch, and has called
        the function there. Variables that the function reads, such as the program's `epoch`, are
        right only in the pass that follows.
        """
        if isinstance(self._epoch.adapter, FunctionLoader):
            self._restore(decode_position({**self.start, "state": None}))

    # -- the loop over the batches --------------------------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether the loop is still using the last batch."""
        return self.use is BatchUse.IN_BODY

    @property
    def left_by_break(self) -> bool:
        """Whether a `break` has followed the last batch."""
        return self.use is BatchUse.LEFT_BY_BREAK

    def next(self) -> tuple[AnyBatch, BatchId]:
        """Reads the next batch, see `Cursor.next`.

        After its last block a scan does not begin another epoch, so that a restart with more
        updates continues there.

        Raises:
            StopIteration: the last batch was read, in this or in an earlier process.
        """
        if self.exhausted_before or (self.is_scan and self.loader.is_finished):
            raise StopIteration
        self.in_loop = True
        if self.use is BatchUse.LEFT_BY_BREAK:
            self.use = BatchUse.WAITING
        return super().next()

    def use_batch(self) -> None:
        """Notes that the loop receives the batch of the last `next`."""
        self.use = BatchUse.IN_BODY

    def end_use(self) -> None:
        """Notes that the loop body has ended."""
        if self.use is BatchUse.IN_BODY:
            self.use = BatchUse.WAITING

    def leave_by_break(self) -> None:
        """Notes that a `break` has ended the loop body.

        What the program does after the loop may still belong to the batch. But if the loop was an
        evaluation, its batches belong to no step.
        """
        self.use = BatchUse.LEFT_BY_BREAK

    def leave_loop(self) -> None:
        """Notes that no loop reads the loader, so that the next loop continues where the loader is.

        Called after the last batch and after a rollback. Without this call, a `break` that came
        before the rollback would make the next loop drop the rest of the epoch.
        """
        self.in_loop = False
