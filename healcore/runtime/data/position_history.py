"""`PositionHistory`: the last positions of a loader, from which an earlier batch can be reached."""

from __future__ import annotations

from collections import deque

from healcore.runtime.data.positions import BatchId, SavedPosition

_MAX_POSITIONS = 4
"""Number of positions that `PositionHistory.before` can start from. Two are not enough: the last
position may be of the epoch after the batch's epoch."""


class PositionHistory:
    """The last positions that were taken, from which an earlier batch can be reached.

    A loader can give its state only for the batch that comes next. A rollback has to go to the
    first batch of a step, which may lie some batches back. The history then has the newest position
    that is not after this batch, and the number of batches in between:

        batches     0   1   2   3   4   5   6   7
        positions       p           q

        before(3)   p, and 2 batches to read and drop
        before(6)   q, and 2 batches to read and drop

    Attributes:
        newest: next batch of the newest position, or None without one.
        last_end: id after the last batch of the last complete epoch, or None. The start of the next
            epoch is the same place. A rewind to this id lets the loader draw the next epoch again.
    """

    def __init__(self) -> None:
        self.newest: BatchId | None = None
        self.last_end: BatchId | None = None
        self._taken: deque[tuple[BatchId, SavedPosition]] = deque(maxlen=_MAX_POSITIONS)
        """The positions with the ids of their next batches, oldest first."""

    def add(self, batch: BatchId, position: SavedPosition) -> None:
        """Adds a position, and forgets the oldest position if there are too many.

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
