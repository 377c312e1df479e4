"""`EarlierLoaders`: the saved positions that no loader of this process has taken over yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healcore.runtime.data.positions import (
    BEGUN,
    COUNT,
    EPOCH,
    LEFT,
    TRAINED,
    BatchId,
    SavedPosition,
    has_begun,
    place_of,
)


class EarlierLoaders:
    """The saved positions that no loader of this process has taken over yet.

    A restarted program makes its loaders again, as other objects. A loader takes over the position
    that was saved under its number, see `LoaderNumbers`. A loop over `Healer.epochs` that returns
    to an earlier epoch is like a restart: the loaders of that epoch take over their positions in
    the same way. A loader that an earlier process has read to its end has a number and no position.

    Attributes:
        positions: number of a loader, as text -> its position.
        count: number of loaders that earlier processes have used.
        begun: epoch -> numbers of the loaders that the program's loop has begun there, in order.
        left: numbers of the loaders whose epoch was left by a `break`, see `LEFT`.
        trained: number of the loader of the last step before the checkpoint, or None if unknown.
        last_begun: number of the loader that the loop read at the checkpoint, or None if unknown.
    """

    def __init__(self) -> None:
        self.positions: dict[str, SavedPosition] = {}
        self.count = 0
        self.begun: dict[int, list[int]] = {}
        self.left: list[int] = []
        self.trained: int | None = None
        self.last_begun: int | None = None

    def load(self, position: Mapping[str, Any]) -> int:
        """Takes the positions of a checkpoint.

        Args:
            position: result of `LoaderRegistry.position` in an earlier process.

        Returns:
            The epoch of the program's own loop.
        """
        self.positions = dict(position)
        self.count = int(self.positions.pop(COUNT, 0))  # type: ignore[arg-type]
        epoch = int(self.positions.pop(EPOCH, 0))  # type: ignore[arg-type]
        begun: Any = self.positions.pop(BEGUN, [])
        left: Any = self.positions.pop(LEFT, [])
        self.left = left
        self.trained = self.positions.pop(TRAINED, None)  # type: ignore[assignment]
        self.note_begun(epoch, begun)
        self.last_begun = None
        for number in begun:
            saved = self.positions.get(str(number))
            if saved is not None and has_begun(saved):  # not the loader of an evaluation
                self.last_begun = number
        return epoch

    def note_begun(self, epoch: int, numbers: Sequence[int]) -> None:
        """Notes which loaders an epoch of the program's loop begins.

        Args:
            epoch: number of the epoch, from 0.
            numbers: numbers of the loaders begun so far, in order. A repeated pass over the epoch
                has begun fewer of them than the pass before.
        """
        if len(numbers) > len(self.begun.get(epoch, ())):
            self.begun[epoch] = [*numbers]

    def forget_before(self, number: int) -> None:
        """Forgets the loaders of earlier epochs, which the program does not make again.

        Args:
            number: number of the first loader that the program makes again.
        """
        for key in [*self.positions]:
            if int(key) < number:
                del self.positions[key]

    def has_ended(self, number: int) -> bool:
        """Whether an earlier process has read all epochs of a loader.

        Its number was used, and no position of it was saved.

        Args:
            number: number of the loader.
        """
        return self.count > number and str(number) not in self.positions

    def has_trained(self, number: int) -> bool:
        """Whether an earlier process has read batches of a loader.

        Args:
            number: number of the loader.
        """
        saved = self.positions.get(str(number))
        if saved is None:  # an earlier process has read all of its batches, or the loader is new
            return number < self.count
        return has_begun(saved)

    def furthest_place(self, default: BatchId) -> BatchId:
        """The furthest of the next batches of all positions.

        Before the program has made its loaders again, this is the best known place in the data.

        Args:
            default: the place without any position.
        """
        return max(map(place_of, self.positions.values()), default=default)

    def number_in(self, epoch: int, next_number: int) -> int:
        """Number of a loader whose first use in this process is in an epoch of the loop.

        A program may make a loader for each epoch. After a restart in epoch 2, it makes no loaders
        of the epochs 0 and 1 again, so their numbers are passed over: the loader gets the number of
        the loader that stands furthest in this epoch. Numbers only grow: the loaders below
        `next_number` exist in this process already, although the end of their epoch may be the
        place where this epoch begins.

        Args:
            epoch: the epoch of the program's loop.
            next_number: the number that the loader gets otherwise.
        """
        low, high = BatchId(epoch - 1, 0), BatchId(epoch + 1, 0)
        in_epoch: dict[int, BatchId] = {}
        for key, position in self.positions.items():
            place = place_of(position)
            if int(key) >= next_number and low < place <= high:
                in_epoch[int(key)] = place
        furthest = max(in_epoch.values(), default=None)
        own = in_epoch.get(next_number)
        if own == furthest or (own is not None and own.index > 0):
            return next_number
        return max(number for number, place in in_epoch.items() if place == furthest)
