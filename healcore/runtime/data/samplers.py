"""The samplers of a torch loader: their epochs, and how they divide the data among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def samplers_of(loader: Any) -> list[Any]:
    """The samplers and batch samplers of a torch loader, including samplers inside samplers."""
    parts = [loader]
    for part in parts:
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not other for other in parts):
                parts.append(inner)
    return parts[1:]


def division(loader: Any) -> list[Any] | None:
    """[unit, number] that must not change with the number of ranks, or None if unknown.

    If it is equal, batch i has the same rows. It is the number of batches for a list or a loader in
    order, where every rank reads the same batches, else the rows per global batch.
    """
    if isinstance(loader, Sequence):
        return ["batches", len(loader)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(batch_sampler, "batch_size", None)
    for sampler in samplers_of(loader):
        replicas = getattr(sampler, "num_replicas", None)
        distributed = sampler is not batch_sampler and hasattr(sampler, "set_epoch")
        if distributed and type(rows) is int and type(replicas) is int:
            return ["rows of a global batch", rows * replicas]
        if is_type(sampler, "torch.utils.data", "SequentialSampler") and hasattr(loader, "__len__"):
            return ["batches", len(loader)]
    return None


def is_type(thing: Any, package: str, *names: str) -> bool:
    """Whether a class of one of these names, in a module of the package, is a base of `thing`."""
    return any(
        kind.__name__ in names and kind.__module__.startswith(package)
        for kind in type(thing).__mro__
    )


class SamplerEpochs:
    """Calls `set_epoch` on samplers and records its arguments: epoch of the cursor -> number.

    DistributedSampler and others need `set_epoch` with the next number for a new order, and with
    the earlier number after a rewind. A user's loop over epochs usually calls `set_epoch`; the
    number is then read, not overwritten.
    """

    def __init__(self, loader: Any) -> None:
        owners: list[Any] = [loader, *samplers_of(loader), getattr(loader, "dataset", None)]
        self._owners = [each for each in owners if callable(getattr(each, "set_epoch", None))]
        self._numbers: dict[int, int] = {}

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """Sets the epoch's number, or reads it if the user's loop began the epoch (`by_user`)."""
        if not self._owners:
            return
        if epoch not in self._numbers and by_user:
            number = self._read()
            self._numbers[epoch] = epoch if number is None else number
            return
        before = self._numbers.get(epoch - 1, epoch - 1)
        self._set(self._numbers.setdefault(epoch, before + 1))

    def number(self, epoch: int) -> int | None:
        """The number of an epoch that has begun or is next, or None if unknown."""
        before = self._numbers.get(epoch - 1)
        return self._numbers.get(epoch, None if before is None else before + 1)

    def restore(self, epoch: int, number: int | None) -> None:
        """Sets the number of an epoch of a saved position."""
        if self._owners and number is not None:
            self._numbers[epoch] = number
            self._set(number)

    def _set(self, number: int) -> None:
        for owner in self._owners:
            owner.set_epoch(number)

    def _read(self) -> int | None:
        for owner in self._owners:
            # Accelerate's loader counts its epochs itself.
            accelerated = is_type(owner, "accelerate.data_loader", "DataLoaderShard")
            number = getattr(owner, "iteration" if accelerated else "epoch", None)
            if type(number) is int:
                return number
        return None
