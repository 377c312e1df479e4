"""Rewinds a `torch.utils.data.DataLoader`, which records no position of its own.

The samplers draw the order of an epoch from random generators when the epoch begins. A position is
the states of the generators at that moment, and the number of batches read since. A rewind sets the
states, lets the samplers draw the order again, and skips the indices of the earlier batches without
reading the data. Also for loaders that Accelerate, Fabric and trainers make from a DataLoader.
"""

from __future__ import annotations

import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from healcore.events.schema import MAX_ROWS
from healcore.runtime.data.loader_adapters import (
    DataError,
    LoaderAdapter,
    catch_unreadable,
    generators_of,
    is_type,
    samplers_of,
)

BEGUN = "_healcore_begun"
"""Attribute of a loader whose next epoch other code has begun: `iter` has drawn a seed."""
_KEPT = 64  # number of recent batches to which a rewind is exact
_FRESH = {"_iterator": None, "_initial_iter_for_state_dict": False}  # also StatefulDataLoader's
_GLOBAL = 3  # number of global generators: of Python, NumPy and torch


def is_replayable(loader: Any) -> bool:
    """Whether a loader is or wraps a DataLoader of a map-style dataset, with torch's `__iter__`."""
    loader = _without_fabric(loader)
    package = "torch.utils.data"
    base = _base(loader)
    if not is_type(base, package, "DataLoader") or not getattr(base, "in_order", True):
        return False
    own = type(base).__iter__ is not sys.modules[package].DataLoader.__iter__
    return not (own and base is loader) and not is_type(base.dataset, package, "IterableDataset")


def _without_fabric(loader: Any) -> Any:
    """The DataLoader inside a loader of Fabric, which moves batches, otherwise the loader."""
    return loader._dataloader if is_type(loader, "lightning", "_FabricDataLoader") else loader


def _recorded(loader: Any) -> Any:
    """A copy of a replayable loader, whose sampler records the order."""
    base = _base(loader)
    name = _order_name(base)
    # Accelerate reads one batch ahead.
    ahead = base.num_workers * (base.prefetch_factor or 0) + 1
    reads_ahead = base is not loader and not base.num_workers
    generators = generators_of((loader, *samplers_of(loader)))
    order = _Order(getattr(base, name), generators, ahead, reads_ahead)
    copied = _with(base, **{name: order}, **_FRESH)
    if base is loader:
        return copied
    # Accelerate calls `__iter__` of the inner loader, in a generator that an exception would end.
    vars(copied)["__iter__"] = lambda: catch_unreadable(type(copied).__iter__(copied))
    return _with(loader, base_dataloader=copied)


def _base(loader: Any) -> Any:
    """The DataLoader inside a loader of Accelerate, otherwise the loader."""
    inside = is_type(loader, "accelerate.data_loader", "DataLoaderShard")
    return loader.base_dataloader if inside else loader


def _order_name(base: Any) -> str:
    return "sampler" if getattr(base, "batch_sampler", None) is None else "batch_sampler"


def _with(loader: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes, which `setattr` of a DataLoader refuses."""
    copied = object.__new__(type(loader))
    vars(copied).update(vars(loader) | attributes)
    return copied


class TorchLoader(LoaderAdapter, Iterator[Any]):
    """Reads a copy of a replayable loader, whose sampler records the order."""

    kind = "dataloader"

    def __init__(self, loader: Any) -> None:
        super().__init__(_without_fabric(loader))
        # Fabric's own generator would end with the first batch that raises.
        self._fabric = None if self._loader is loader or loader.device is None else loader
        self._copy = _recorded(self._loader)
        self._base = _base(self._copy)
        self._order: _Order = getattr(self._base, _order_name(self._base))
        self._accelerated = self._base is not self._copy
        self.draws = not self._base.num_workers
        self._reading: Iterator[Any] | None = None  # of this epoch; None before its first batch
        self._index = 0  # number of batches read from this epoch
        self._draws_first = False  # whether the samplers draw the order before `iter` is called

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch when its first batch is read."""
        self._copy_settings()
        self._order.begin()
        self._reading, self._index = None, 0
        self._draws_first = vars(self._loader).pop(BEGUN, False)
        return self

    def state(self, *, ended: bool) -> dict[str, Any]:
        """Random states before the epoch, and number and digest of the batches read from it."""
        order = self._order
        if order.start_states is None:
            # A new iterator draws a seed for its workers, and running workers do not.
            running = self._base.persistent_workers and self._base._iterator is not None
            return {"generators": order.states()[_GLOBAL:], "begun": running or self._draws_first}
        return self._state_before(self._index)

    def state_before(self, index: int) -> dict[str, Any] | None:
        """The state before a batch that was read, or None if unknown or reading draws nothing.

        None before the first batch too: the order is drawn together with that batch.
        """
        order = self._order
        if index == 0:
            return None
        known = order.reads_ahead and order.start_states is not None and order.planned is None
        return self._state_before(index) if known and order.knows(index) else None

    def _state_before(self, index: int) -> dict[str, Any]:
        order = self._order
        place = {"index": index, "random": order.start_states, "digest": order.digest(index)}
        return {**place, "ahead": order.states_ahead(index)} if order.reads_ahead else place

    def rows(self) -> list[int] | None:
        """The first indices of the batch that was read last, or None if they are no numbers."""
        item = self._order.item(self._index)
        rows = item if isinstance(item, (list, tuple)) else [item]
        return [each for each in rows[:MAX_ROWS] if isinstance(each, int)] or None

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        """Restores a state. The order of the earlier batches is drawn again.

        Raises:
            DataError: the samplers give another order. The loader stays where it is.
        """
        order = self._order
        index = state.get("index")
        if index is None:
            self.start(0)
            order.set_states(state["generators"])
            self._draws_first = state["begun"]
            if not self._draws_first:
                self._base._iterator = None  # ends workers that were started later
            return self, skip
        digest = (int(state["digest"][0]), int(state["digest"][1]))
        at_index = self._reading is not None and self._index == index and not skip
        if at_index and order.start_states and order.digest(index) == digest:
            return self, 0
        self._copy_settings()
        current = order.states()
        try:
            after = order.draw(state["random"], index + skip, digest)
            self._reading = None
            if order.reads_ahead:  # begins when the random states of the step are restored
                order.planned = [] if skip else list(state.get("ahead", ()))
            else:
                self._reading = self._begin()
            current[_GLOBAL:] = after[_GLOBAL:]
        finally:
            order.set_states(current)
        self._index = index + skip
        self._draws_first = False
        return self, 0

    def __next__(self) -> Any:
        if self._reading is None and self._draws_first:
            after = self._order.draw(self._order.states())
            self._reading = self._begin()
            self._order.set_states(after)
        elif self._reading is None:
            if self._order.planned is not None:
                self._order.planned.append(self._order.states())
            self._reading = self._begin()
        try:
            batch = next(self._reading)
        except StopIteration:
            self._reading = None
            self._order.begin()
            if self._accelerated:
                self._loader.iteration = self._copy.iteration
            raise
        except Exception:  # the loader continues after a batch that cannot be read
            self._index += 1
            raise
        self._index += 1
        if self._fabric is not None:
            module = sys.modules[type(self._fabric).__module__]
            return module.move_data_to_device(batch, self._fabric.device)
        return batch

    def _copy_settings(self) -> None:
        """Copies what the loop may set, such as `collate_fn`, and Accelerate's count of epochs."""
        given = vars(_base(self._loader)).items()
        own = {_order_name(self._base), *_FRESH}
        vars(self._base).update((name, value) for name, value in given if name not in own)
        if self._accelerated:
            self._copy.iteration = self._loader.iteration

    def can_read_again(self, index: int) -> bool:
        """False for the first batch of an epoch whose order the ranks have agreed on at its begin.

        Accelerate then sends the state of the sampler's generator to all ranks, and this rank does
        not know the state that it has received.
        """
        distributed = sys.modules["torch"].distributed
        alone = not distributed.is_initialized() or distributed.get_world_size() == 1
        return index > 0 or alone or not getattr(self._copy, "rng_types", None)

    def _begin(self) -> Iterator[Any]:
        batches = iter(self._copy)
        if not self._accelerated:
            return batches
        # Accelerate begins, exchanges and draws numbers, with the first batch.
        exchanged = vars(self._copy)["rng_types"]
        if self.reads_again:
            vars(self._copy)["rng_types"] = None
        try:
            return chain([*islice(batches, 1)], batches)
        finally:
            vars(self._copy)["rng_types"] = exchanged


class _Order:
    """The items of a sampler. Records the random states from which their order follows.

    Args:
        sampler: the sampler or batch sampler.
        generators: generators of the loader and its samplers, besides the global generators.
        ahead: largest number of items that the loader reads ahead.
        reads_ahead: whether this process reads them, so that their examples may draw random
            numbers between the numbers of the steps.
    """

    def __init__(
        self, sampler: Iterable[Any], generators: list[Any], ahead: int, reads_ahead: bool
    ) -> None:
        torch = sys.modules["torch"]  # imported, because the loader is of torch
        self._sampler = sampler
        self._sources: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
            (torch.get_rng_state, torch.set_rng_state),
            *((each.get_state, each.set_state) for each in generators),
        ]
        self._ahead = ahead
        self.reads_ahead = reads_ahead
        self.begin()

    def begin(self) -> None:
        """Begins a new epoch, whose order is drawn when its first index is read."""
        self.start_states: list[Any] | None = None  # the states before the order was drawn
        self.planned: list[list[Any]] | None = None
        """After a resume: the states to set before each of the next items is read, else None."""
        self._before: deque[list[Any]] = deque(maxlen=_KEPT)
        """If `reads_ahead`: the states before each of the last items was read."""
        self._drawn: Iterator[Any] | None = None  # the rest of an order of `draw`, for `__iter__`
        self._count = 0  # number of items that the loader has taken
        self._recent: deque[tuple[Any, int]] = deque([(None, 0)], maxlen=self._ahead + _KEPT)
        """The last items, each with the digest of all items up to it."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the sampler, such as `set_epoch` and `batch_size`, except its state."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._recorded() if self._drawn is None else self._drawn

    def digest(self, count: int) -> tuple[int, int]:
        """The number of batches and the digest of their indices, after `count` batches."""
        return count, self._recent[count - self._count - 1][1]

    def item(self, count: int) -> Any:
        """The item before `count`, which is an index or a list of indices."""
        return self._recent[count - self._count - 1][0]

    def states_ahead(self, count: int) -> list[list[Any]]:
        """Random states before the item was read that Accelerate reads ahead after `count`."""
        if self.planned is not None:
            return self.planned
        return list(self._before)[len(self._before) - (self._count - count) :][:1]

    def knows(self, count: int) -> bool:
        """Whether the states before the item after the first `count` are known."""
        return self._count - len(self._before) <= count

    def draw(self, states: list[Any], skip: int = 0, digest: tuple[int, int] = (0, 0)) -> list[Any]:
        """Sets random states, draws an order and passes its first `skip` items.

        Returns the random states after the order was drawn. Raises DataError if the order is not
        the order of `digest`; the current order is then unchanged.
        """
        self.set_states(states)
        items = iter(self._sampler)
        recent = deque([(None, 0)], maxlen=self._ahead + _KEPT)
        matches = not digest[0]
        for number in range(1, skip + 1):
            recent.append(_digested(next(items, None), recent))
            matches |= (number, recent[-1][1]) == digest
        # Samplers draw when their first item is read. Some draw at each item: not before its turn.
        first = [] if skip else [*islice(items, 1)]
        if not matches:
            raise DataError(
                "the samplers do not give the same order again: they draw from a generator that is "
                "neither a global one nor their attribute `generator`, or the dataset has changed"
            )
        self.start_states = states
        self._count = skip
        self._recent = recent
        self._drawn = self._noted(chain(first, items))
        return self.states()

    def states(self) -> list[Any]:
        """The current random states: of Python, NumPy and torch, then of the generators."""
        return [get() for get, _ in self._sources]

    def set_states(self, states: list[Any]) -> None:
        """Sets random states: all, or the states of the generators alone."""
        first = len(self._sources) - len(states)
        for (_, set_state), state in zip(self._sources[first:], states, strict=True):
            set_state(state)

    def _recorded(self) -> Iterator[Any]:
        self.begin()
        self.start_states = self.states()
        yield from self._noted(iter(self._sampler))

    def _noted(self, items: Iterator[Any]) -> Iterator[Any]:
        self._drawn = None  # the next `iter` begins another epoch; with workers, `iter` runs twice
        for item in items:
            self._count += 1
            self._recent.append(_digested(item, self._recent))
            if self.reads_ahead:
                self._set_planned()
                self._before.append(self.states())
            yield item
        self._set_planned(last=True)

    def _set_planned(self, *, last: bool = False) -> None:
        """Sets the random states of the next planned item, or of the step after the last item."""
        if self.planned:
            self.set_states(self.planned[-1] if last else self.planned[0])
        self.planned = None if last or not self.planned else self.planned[1:] or None


def _digested(item: Any, recent: deque[tuple[Any, int]]) -> tuple[Any, int]:
    """The item with the digest of all items up to it."""
    return item, zlib.crc32(repr(item).encode(), recent[-1][1])


# -- epochs and ranks of samplers -----------------------------------------------------------------


def division(loader: Any) -> list[Any] | None:
    """What has to stay equal for another number of ranks, as [unit, number], or None if unknown.

    Then batch i has the same rows. The unit is batches if every rank reads the same ones (a list, a
    loader in order), else rows of a global batch.
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


class SamplerEpochs:
    """Calls `set_epoch` on samplers and records its arguments: epoch of the cursor -> number.

    DistributedSampler and others need `set_epoch` with the next number for a new order, and with
    the earlier number after a rewind. A user's loop over epochs usually calls `set_epoch`; the
    number is then read, not overwritten.
    """

    def __init__(self, loader: Any) -> None:
        owners: list[Any] = [loader, *samplers_of(loader), getattr(loader, "dataset", None)]
        self._owners = [each for each in owners if callable(getattr(each, "set_epoch", None))]
        wrapped = is_replayable(loader) and _without_fabric(loader) is not loader
        self._fabric = loader if wrapped else None  # whose iterations count the epochs
        self._numbers: dict[int, int] = {}

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """Sets the epoch's number, or reads it if the user's loop began the epoch (`by_user`)."""
        if epoch not in self._numbers and by_user:
            self._numbers[epoch] = self._read(default=epoch)
            if self._fabric is None:
                return
        number = self.number(epoch)
        self.restore(epoch, epoch if number is None else number)

    def number(self, epoch: int) -> int | None:
        """The number of an epoch that has begun or is next, or None if unknown."""
        before = self._numbers.get(epoch - 1)
        return self._numbers.get(epoch, None if before is None else before + 1)

    def restore(self, epoch: int, number: int | None) -> None:
        """Sets the number of an epoch of a saved position."""
        if number is not None:
            self._numbers[epoch] = number
            for owner in self._owners:
                owner.set_epoch(number)
            if self._fabric is not None:
                self._fabric._num_iter_calls = number + 1

    def _read(self, default: int) -> int:
        if self._fabric is not None:
            return self._fabric._num_iter_calls
        for owner in self._owners:
            name = "epoch" if _base(owner) is owner else "iteration"  # Accelerate's own count
            if type(number := getattr(owner, name, None)) is int:
                return number
        return default
