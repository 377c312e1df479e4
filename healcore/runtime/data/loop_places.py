"""Where the program's own loop and its loaders are, in this process and in earlier ones.

`EpochLoop` knows the program's loop over epochs; `EarlierLoaders` has the positions that an earlier
process has saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healcore.runtime.data.positions import BatchId, DataError, SavedPosition, decode_position

EPOCH = "epoch"
"""Key next to the positions of loaders: the epoch of the program's loop."""
COUNT = "count"
"""Key next to the positions of loaders: the number of loaders so far."""
BEGUN = "begun"
"""Key next to the positions of loaders: the numbers of the loaders that the loop has begun in this
epoch, in order. Checkpoints of 0.3.0 do not have it."""


def place_of(position: Mapping[str, Any]) -> BatchId:
    """The next batch of a position.

    Args:
        position: a position that `check_positions` has accepted.

    Returns:
        Epoch and index of the batch, both from 0.
    """
    return BatchId(position["epoch"], position["index"])


def has_begun(position: Mapping[str, Any]) -> bool:
    """Whether a batch was read before a position."""
    return place_of(position) > BatchId(0, 0)


def check_positions(position: Mapping[str, Any]) -> None:
    """Checks the positions of a checkpoint before anything is restored from it.

    Raises:
        DataError: a part of them cannot be read.
    """
    for key, value in position.items():
        if key == BEGUN:
            if not isinstance(value, list):
                raise DataError(f"the numbers of loaders are a list, not {value!r:.80}")
            for number in value:
                _check_number("number of a loader", number)
        elif key in (COUNT, EPOCH):
            _check_number(f"{key} of loaders", value)
        else:
            decode_position(value)


def _check_number(name: str, value: object) -> None:
    """Raises DataError for a value that is no whole number >= 0."""
    if type(value) is not int or value < 0:
        raise DataError(f"the {name} is a whole number >= 0, not {value!r:.80}")


class EpochLoop:
    """The program's own loop over epochs, and the return to an earlier epoch of it.

    Three kinds of programs train for epochs:

        for batch in healer.batches(loader, epochs=3)       healcore counts the epochs
        for epoch in range(3): ... batches(loader)          the program counts, healcore cannot
                                                            change its number (`crossed`)
        for epoch in healer.epochs(3): ... batches(loader)  healcore yields the numbers, and can
                                                            return to an earlier one

    The third kind is in one of these states:

        `can_return`  `returns_to`  state
        ------------  ------------  ------------------------------------------------------------
        False         None          no loop over `Healer.epochs` runs
        True          None          the body of an epoch runs
        True          a number      a rollback has led before this epoch: its passes have no further
                                    batch, and `Healer.epochs` yields this number next

    Attributes:
        next_epoch: epoch at which the program's own loop continues after a restart. While the code
            after an epoch runs, still that epoch, which has no batch left.
        names_epochs: whether the program's loop passes the number of its epoch.
        can_return: whether a loop over `Healer.epochs` runs, which can return to an earlier epoch.
        returns_to: epoch to which this loop returns because of a rollback, or None. Until then the
            passes of the loaders that were rewound have no further batch.
        crossed: epoch that a loop was in when the last rewind has led it into an earlier epoch, to
            which it does not return, or None.
        total_epochs: number of the epoch at which a loop over `Healer.epochs` ends.
        changed_in: epoch in which the program has last changed the structure of its model, or -1. A
            loop over `Healer.epochs` returns to later epochs only.
    """

    def __init__(self) -> None:
        self.next_epoch = 0
        self.names_epochs = False
        self.can_return = False
        self.returns_to: int | None = None
        self.crossed: int | None = None
        self.total_epochs = 0
        self.changed_in = -1
        self._returned: Mapping[str, Any] = {}
        """The positions of the last return, as long as its epoch runs; otherwise empty."""
        self._begun: list[int] = []
        """Numbers of the loaders that the loop has begun in this pass over its epoch, in order."""
        self._begun_epoch: int | None = None
        """The epoch of `_begun`, or None before the program has named an epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`.

        Args:
            epoch: number of the epoch. After a return it is an earlier one.
        """
        self.next_epoch = epoch
        self.can_return = True
        if epoch != self._returned.get(EPOCH):  # the positions are of that epoch only
            self._returned = {}
        self._begun, self._begun_epoch = [], epoch

    @property
    def has_more_epochs(self) -> bool:
        """Whether another epoch follows the current epoch of a loop over `Healer.epochs`.

        The end of a loader is the end of a pass then, and not of the run. False if the number of
        epochs is unknown, as in the program's own `for epoch in range(n)`: any end of a loader may
        be the end of the run.
        """
        return self.can_return and self.next_epoch + 1 < self.total_epochs

    def _begin_return(self, position: Mapping[str, Any]) -> None:
        """Makes the loop return to the epoch of a position."""
        self._returned = position
        self.returns_to = int(position[EPOCH])

    def _end_return(self) -> int:
        """Ends a return. Returns the epoch that the loop yields next."""
        assert self.returns_to is not None
        epoch, self.returns_to = self.returns_to, None
        return epoch


class EarlierLoaders:
    """The saved positions that no loader of this process has taken over yet.

    A restarted program makes its loaders anew. They are recognized by their number, in the order of
    first use. After a rollback a loop over `Healer.epochs` returns to an epoch as a restart would,
    and a program that makes a loader for each epoch makes the loaders of that epoch anew. A loader
    that an earlier process has read to its end has a number and no position.

    Attributes:
        positions: number of a loader, as text -> its position.
        count: number of loaders that earlier processes have used.
        begun: epoch -> numbers of the loaders that the program's loop has begun there, in order.
        last_begun: number of the loader that the loop read at the checkpoint, or None if unknown.
    """

    def __init__(self) -> None:
        self.positions: dict[str, SavedPosition] = {}
        self.count = 0
        self.begun: dict[int, list[int]] = {}
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
            epoch: the epoch.
            numbers: numbers of the loaders begun so far, in order. A repeated pass over the epoch
                has begun fewer of them than the pass before.
        """
        if len(numbers) > len(self.begun.get(epoch, ())):
            self.begun[epoch] = [*numbers]

    def forget_before(self, number: int) -> None:
        """Forgets the loaders of earlier epochs, which the program does not make again.

        Args:
            number: number of the first loader that it makes again.
        """
        self.positions = {key: at for key, at in self.positions.items() if int(key) >= number}

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
            number: number of the loader. One without a position has ended if its number was used,
                and is new otherwise.
        """
        saved = self.positions.get(str(number))
        if saved is None:  # an earlier process has read all of its batches, or it is new
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

        A program may make a loader for each epoch. A restart in epoch 2 makes no loaders of the
        epochs 0 and 1 again, so their numbers are skipped: the loader gets the number of the loader
        that stands furthest in this epoch. Numbers only grow: a loader that has no number yet is
        none of those before `next_number`, although their positions may be at the end of the epoch
        before.

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
