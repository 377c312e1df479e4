"""`LoaderNumbers`: the number of each loader, by which a restarted program finds it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.runtime.data.earlier_loaders import EarlierLoaders
from healcore.runtime.data.epoch_loop import EpochLoop
from healcore.runtime.data.positions import has_begun


class LoaderNumbers:
    """Numbers the loaders of a run in the order of their first use.

    A restarted program makes its loaders again, as other objects. It makes them in the same order,
    so the number is what a loader and its saved position have in common. A program that makes a
    loader for each epoch makes none of the epochs before the restart again, so their numbers must
    be passed over. A loader at its first use gets, by the first line that applies:

        in an epoch that the loop has begun before, because   the number of the loader that was
        a restart or a return has led into the epoch          begun at the same place of the epoch
        in an epoch that the program names, with positions    the number of the loader that stands
        of an earlier process in this epoch                   furthest in the epoch
        otherwise                                             the next number

    Args:
        earlier: the positions that earlier processes have saved.
        epoch_loop: the program's own loop over epochs.

    Attributes:
        next: the next number that no loader has.
    """

    def __init__(self, earlier: EarlierLoaders, epoch_loop: EpochLoop) -> None:
        self.next = 0
        self._earlier = earlier
        self._epoch_loop = epoch_loop
        self._begun: list[int] = []
        """Numbers of the loaders that the loop has begun in this pass over its epoch, in order."""
        self._begun_epoch: int | None = None
        """The epoch of `_begun`, or None before the program has named an epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`, possibly an epoch that it repeats."""
        self._begun, self._begun_epoch = [], epoch

    def of_new(self, epoch: int | None) -> int:
        """The number for a loader that the program has made since the start or the last return.

        Args:
            epoch: the epoch of the program's own loop, or None if the loop does not name it.
        """
        known_epoch = self._epoch_loop.known_epoch(epoch)
        if known_epoch is not None:
            before = self._earlier.begun.get(known_epoch, [])
            place = 0
            if known_epoch == self._begun_epoch:
                place = len(self._begun)
            if place < len(before) and before[place] not in self._begun:
                return before[place]
        if epoch is None:
            return self.next
        return self._earlier.number_in(epoch, self.next)

    def use(self, number: int, epoch: int | None) -> None:
        """Notes that the loop begins a loader.

        Args:
            number: the number of the loader.
            epoch: the epoch of the program's own loop, or None if the loop does not name it.
        """
        self.next = max(self.next, number + 1)
        known_epoch = self._epoch_loop.known_epoch(epoch)
        if known_epoch is None:
            return
        if known_epoch != self._begun_epoch:
            self._begun, self._begun_epoch = [], known_epoch
        if number not in self._begun:
            self._begun.append(number)
            self._earlier.note_begun(known_epoch, self._begun)

    def count_from(self, number: int) -> None:
        """Passes over the numbers of the loaders that the program does not make again.

        Args:
            number: the least number of the next new loader. A number is never lowered.
        """
        self.next = max(self.next, number)
        self._earlier.forget_before(number)

    def pass_over_completed(self) -> None:
        """Passes over the numbers of the loaders that a completed run has trained with."""
        for number, saved in self._earlier.positions.items():
            if has_begun(saved):
                self.next = max(self.next, int(number) + 1)

    def return_to(self, positions: Mapping[str, Any]) -> None:
        """Numbers the loaders from now on as after a restart from these positions."""
        self._earlier.load(positions)
        self.next = self._earlier.count

    def begun_in(self, epoch: int) -> list[int] | None:
        """Numbers of the loaders begun in this pass over an epoch, or None in another epoch."""
        if self._begun_epoch != epoch:
            return None
        return [*self._begun]

    def recent(self) -> set[int]:
        """Numbers of the loaders that the loop has begun in this epoch or the epoch before."""
        if self._begun_epoch is None:
            return set()
        before = self._earlier.begun.get(self._begun_epoch - 1, ())
        return {*self._begun, *before}

    @property
    def has_begun_last(self) -> bool:
        """Whether the loop has begun the loader in which the checkpoint was saved.

        An epoch may read several loaders. After a restart within the second one, the pass over the
        first one has no batch, and its end is not the place of the checkpoint. Also True for a
        checkpoint that does not name this loader.
        """
        return self._earlier.last_begun is None or self._earlier.last_begun in self._begun
