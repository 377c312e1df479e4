"""`SamplerEpochs`: the numbers that `set_epoch` of a loader and its samplers gets."""

from __future__ import annotations

from typing import Any

from healcore.runtime.data.loader_parts import AnyLoader, samplers_of
from healcore.runtime.data.torch_loader import base_of, is_replayable, without_fabric


class SamplerEpochs:
    """Calls `set_epoch` of samplers, and records the argument for each epoch of the cursor.

    A DistributedSampler draws the order of an epoch from the number that `set_epoch` gets. It needs
    the next number for a new order, and the earlier number after a rewind. A user's loop over
    epochs usually calls `set_epoch` itself. This number is then read and recorded, and not set.

    Args:
        loader: the user's loader. `set_epoch` is called on it, its samplers and its dataset, where
            they have this method.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self._owners: list[Any] = []
        """The objects with `set_epoch`."""
        parts: list[Any] = [loader, *samplers_of(loader), getattr(loader, "dataset", None)]
        for each in parts:
            if callable(getattr(each, "set_epoch", None)):
                self._owners.append(each)
        self._fabric: Any = None
        """A loader of Fabric, which counts its iterations as epochs, or None."""
        if is_replayable(loader) and without_fabric(loader) is not loader:
            self._fabric = loader
        self._numbers: dict[int, int] = {}
        """Epoch of the cursor -> argument of `set_epoch`."""

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """Sets the epoch's number, or reads it if the user's loop began the epoch.

        Args:
            epoch: number of the epoch for the cursor, from 0.
            by_user: whether the user's loop has requested this epoch.
        """
        if epoch not in self._numbers and by_user:
            self._numbers[epoch] = self._read(default=epoch)
            if self._fabric is None:
                return
        number = self.number(epoch)
        if number is None:
            number = epoch
        self.restore(epoch, number)

    def number(self, epoch: int) -> int | None:
        """The argument of `set_epoch` for an epoch.

        Args:
            epoch: number of the epoch for the cursor, from 0.

        Returns:
            The number, of an epoch that has begun or is next. None if it is unknown.
        """
        if epoch in self._numbers:
            return self._numbers[epoch]
        before = self._numbers.get(epoch - 1)
        if before is None:
            return None
        return before + 1

    def restore(self, epoch: int, number: int | None) -> None:
        """Sets the number of an epoch of a saved position.

        Args:
            epoch: number of the epoch for the cursor, from 0.
            number: argument for `set_epoch`, or None to set nothing.
        """
        if number is None:
            return
        self._numbers[epoch] = number
        for owner in self._owners:
            owner.set_epoch(number)
        if self._fabric is not None:
            self._fabric._num_iter_calls = number + 1

    def _read(self, default: int) -> int:
        """The number that the user's loop has set, or the default if no object has it."""
        if self._fabric is not None:
            return self._fabric._num_iter_calls
        for owner in self._owners:
            name = "epoch"
            if base_of(owner) is not owner:
                name = "iteration"  # Accelerate counts in it
            number = getattr(owner, name, None)
            if type(number) is int:
                return number
        return default
