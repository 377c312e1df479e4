"""The epochs that a loop reads of a loader (`EpochRange`), and its last positions in them.

`PositionHistory` has the positions from which a rollback can reach an earlier batch.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from healcore.runtime.data.positions import BatchId, SavedPosition

_MAX_POSITIONS = 4
"""Number of positions that `PositionHistory.before` can start from. Two are not enough: the last
position may be of the epoch after the batch's epoch."""


@dataclass
class EpochRange:
    """The epochs that the user's loop has asked for.

    A program calls `batches` once for all epochs, or once in each epoch of its own loop. The second
    kind of program also calls `set_epoch` itself, before each of these calls. `requested` is the
    epoch for which it has done so.
    """

    requested: float = 0
    """The epoch that the user's loop requested last, so that the user has set its number."""
    end: float = 0
    """Reading ends before this epoch. Infinity for no end."""

    @property
    def has_end(self) -> bool:
        """Whether the number of epochs is limited."""
        return self.end < math.inf

    def extend(self, epochs: int | None) -> None:
        """Adds further epochs, or removes the end.

        Args:
            epochs: number of further epochs, >= 1, or None for no end.
        """
        if epochs is None:
            self.end = math.inf
        elif self.has_end:
            self.requested = self.end
            self.end += epochs

    def select(self, epoch: int) -> None:
        """Makes one epoch the only epoch: reading begins and ends with it.

        Called for a loop of the program over its epochs, which asks for the batches of each epoch
        by its number.

        Args:
            epoch: the epoch, for which the user's loop has called `set_epoch` already.
        """
        self.requested = epoch
        self.end = epoch + 1

    def end_before(self, epoch: int) -> None:
        """Makes reading end before an epoch, unless it has no end.

        Without this, a rollback into an earlier epoch would read on into the epoch that the
        program's own loop is about to begin, and its batches would come twice.

        Args:
            epoch: the epoch at which the program's own loop continues.
        """
        if self.has_end:
            self.end = epoch


class PositionHistory:
    """The last positions that were taken, from which a batch before now can be reached.

    A loader tells its state only now. A rollback has to go to the first batch of a step, which may
    lie some batches back. The history answers with the newest position that is not behind that
    batch, and with the number of batches in between.

    Attributes:
        newest: next batch of the newest position, or None without one.
        last_end: id after the last batch of the last complete epoch, or None. The start of the
            epoch after is the same place. A rewind to it lets the loader draw that epoch again.
    """

    def __init__(self) -> None:
        self.newest: BatchId | None = None
        self.last_end: BatchId | None = None
        self._taken: deque[tuple[BatchId, SavedPosition]] = deque(maxlen=_MAX_POSITIONS)
        """The positions with the ids of their next batches, oldest first."""

    def add(self, batch: BatchId, position: SavedPosition) -> None:
        """Adds a position. The oldest one may be forgotten.

        Args:
            batch: the next batch.
            position: the position before it.
        """
        self.newest = batch
        self._taken.append((batch, position))

    def restart_at(self, batch: BatchId, position: SavedPosition) -> None:
        """Forgets all positions but one, after a rewind: the others may lie in the future.

        Args:
            batch: the next batch.
            position: the position before it, to which the loader was moved.
        """
        self._taken.clear()
        self.add(batch, position)

    def before(self, batch: BatchId) -> SavedPosition | None:
        """A position from which a batch can be reached.

        A position at the start of the epoch serves only for its first batch: the order of the epoch
        may be drawn when that batch is read, after the position was taken.

        Args:
            batch: the batch that is to be read next after a rewind.

        Returns:
            A position of the same epoch with the number of batches to pass, or None if no known
            position is before the batch.
        """
        for known, position in reversed(self._taken):
            is_earlier = known.epoch == batch.epoch and 0 < known.index < batch.index
            if known == batch or is_earlier:
                behind = position["behind"] + batch.index - known.index
                return {**position, "index": batch.index, "behind": behind}
        return None
