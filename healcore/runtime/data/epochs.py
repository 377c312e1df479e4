"""`set_epoch`: samplers that shuffle by epoch number must be told the number, and told it again.

DistributedSampler and its like give the same order in every pass until somebody tells them the next
epoch, and a rewind to an earlier epoch has to tell them that one. A loop with `for epoch in ...`
outside usually tells them itself; what it told is read and remembered, not overwritten.
"""

from __future__ import annotations

from typing import Any


class EpochNumbers:
    """Tells, and remembers what was told: cursor epoch -> number."""

    def __init__(self, loader: Any) -> None:
        batch_sampler = getattr(loader, "batch_sampler", None)
        places = (
            loader,
            getattr(loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(loader, "dataset", None),
        )
        tellable = [place for place in places if callable(getattr(place, "set_epoch", None))]
        self._places: list[Any] = list({id(place): place for place in tellable}.values())
        self._told: dict[int, int] = {}

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """A pass begins.

        Args:
            epoch: the cursor's count.
            by_user: the user's loop asked for this pass, and has told its number if anybody has.
        """
        if not self._places:
            return
        if epoch in self._told:
            self._tell(self._told[epoch])
            return
        if by_user:
            number = self._read()
        else:
            number = self._told.get(epoch - 1, epoch - 1) + 1
            self._tell(number)
        self._told[epoch] = epoch if number is None else number

    def number(self, epoch: int) -> int | None:
        """What was told for an epoch, or will be if the cursor begins it."""
        before = self._told.get(epoch - 1)
        return self._told.get(epoch, None if before is None else before + 1)

    def back_to(self, epoch: int, number: int | None) -> None:
        """The cursor goes to an epoch for which `number` was told."""
        if self._places and number is not None:
            self._told[epoch] = number
            self._tell(number)

    def _tell(self, number: int) -> None:
        for place in self._places:
            place.set_epoch(number)

    def _read(self) -> int | None:
        for place in self._places:
            number = getattr(place, "epoch", None)
            if type(number) is int:
                return number
        return None
