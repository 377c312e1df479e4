"""Rewinds a `torch.utils.data.DataLoader`, which records no position of its own.

The samplers draw the order of an epoch from random generators when the epoch begins. A position is
the states of the generators at that moment, and the number of batches read since. A rewind sets the
states, lets the samplers draw the order again, and skips the indices of the earlier batches without
reading the data. This includes loaders that Accelerate, Fabric and trainers make from a DataLoader.
"""

from __future__ import annotations

import operator
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from healcore.events.kinds import MAX_ROWS
from healcore.runtime.data.loader_adapter import BatchIterator, LoaderAdapter, catch_unreadable
from healcore.runtime.data.loader_parts import (
    AnyBatch,
    AnyLoader,
    LoaderState,
    is_type,
    random_generators_of,
    samplers_of,
)
from healcore.runtime.data.positions import DataError
from healcore.runtime.data.random_states import generator_state, set_generator_state

EPOCH_BEGUN = "_healcore_begun"
"""Attribute of a loader whose next epoch other code has begun: `iter` has drawn a seed."""
_MAX_EXACT_BATCHES = 64
"""Number of recent batches to which a rewind is exact."""
_UNBEGUN_ATTRIBUTES = {"_iterator": None, "_initial_iter_for_state_dict": False}
"""Attributes of a DataLoader that has not begun an epoch, also of a StatefulDataLoader."""
_GLOBAL_GENERATORS = 3
"""Number of global random generators: of Python, NumPy and torch."""

RandomStateList = list[Any]
"""The states of the global random generators of Python, NumPy and torch, then of the loader's own
random generators."""
Item = Any
"""What a sampler yields: the index of a row, or the list of the indices of a batch."""


def is_replayable(loader: AnyLoader) -> bool:
    """Whether a loader is or wraps a DataLoader of a map-style dataset, with torch's `__iter__`.

    The order of such a loader follows from the random states at the start of the epoch alone. A
    subclass with an `__iter__` of its own may do anything, and is read as any other loader.
    """
    loader = without_fabric(loader)
    package = "torch.utils.data"
    base = base_of(loader)
    if not is_type(base, package, "DataLoader") or not getattr(base, "in_order", True):
        return False
    has_own_iter = type(base).__iter__ is not sys.modules[package].DataLoader.__iter__
    if has_own_iter and base is loader:
        return False
    return not is_type(base.dataset, package, "IterableDataset")


def without_fabric(loader: AnyLoader) -> AnyLoader:
    """The DataLoader inside a loader of Fabric, or the loader itself.

    Fabric's loader only moves the batches to the device, so the order is a matter of the inner
    loader.
    """
    if is_type(loader, "lightning", "_FabricDataLoader"):
        return loader._dataloader
    return loader


def base_of(loader: AnyLoader) -> AnyLoader:
    """The DataLoader inside a loader of Accelerate, or the loader itself.

    Accelerate's loader iterates over the inner loader, and reads one batch ahead of it to notice
    the last batch. The order of the epoch is therefore drawn by the inner loader, one batch early.
    """
    if is_type(loader, "accelerate.data_loader", "DataLoaderShard"):
        return loader.base_dataloader
    return loader


def _recorded(loader: AnyLoader) -> AnyLoader:
    """A copy of a replayable loader, whose sampler records the order.

    Only the copy is read. The user's loader keeps its own sampler, and can be read at the same
    time, for example by an evaluation.
    """
    base = base_of(loader)
    name = _order_name(base)
    # Accelerate reads one batch ahead.
    ahead = base.num_workers * (base.prefetch_factor or 0) + 1
    reads_ahead = base is not loader and not base.num_workers
    generators = random_generators_of((loader, base, base.dataset, *samplers_of(loader)))
    order = _RecordedSampler(getattr(base, name), generators, ahead, reads_ahead)
    copied = _with(base, **{name: order}, **_UNBEGUN_ATTRIBUTES)
    if base is loader:
        return copied
    # Accelerate calls `__iter__` of the inner loader, in a generator that an exception would end.
    vars(copied)["__iter__"] = lambda: catch_unreadable(type(copied).__iter__(copied))
    return _with(loader, base_dataloader=copied)


def _order_name(base: AnyLoader) -> str:
    """The attribute of a DataLoader that yields its order: of rows, or of batches."""
    if getattr(base, "batch_sampler", None) is None:
        return "sampler"
    return "batch_sampler"


def _with(loader: AnyLoader, **attributes: Any) -> AnyLoader:
    """A shallow copy with other attributes, which `setattr` of a DataLoader refuses."""
    copied = object.__new__(type(loader))
    vars(copied).update(vars(loader) | attributes)
    return copied


class TorchLoader(LoaderAdapter, Iterator[AnyBatch]):
    """Reads a copy of a replayable loader, whose sampler records the order.

    A state is one of two things:

        before the first batch   the states of the loader's own random generators. The order is not
                                 drawn yet.
        within an epoch          all random states before the order was drawn, the number of batches
                                 read since, and a digest of their indices; if nothing is read
                                 ahead, also the own generators' states of now

    `resume` of the second kind sets the random states and draws the order again. It then compares
    the digest: a sampler that draws from an unknown source is noticed before a wrong batch is read.

    Args:
        loader: a loader for which `is_replayable` is true.
    """

    kind = "dataloader"

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(without_fabric(loader))
        self._fabric: Any = None
        """A loader of Fabric that moves batches to its device, or None."""
        if self._loader is not loader and loader.device is not None:
            # Fabric's own generator would end with the first batch that raises.
            self._fabric = loader
        self._copy = _recorded(self._loader)
        self._base = base_of(self._copy)
        self._order: _RecordedSampler = getattr(self._base, _order_name(self._base))
        self._accelerated = self._base is not self._copy
        self.draws = not self._base.num_workers
        self._reading: BatchIterator | None = None
        """The iterator of this epoch, or None before its first batch."""
        self._index = 0
        """Number of batches read from this epoch."""
        self._draws_first = False
        """Whether the samplers draw the order before `iter` is called."""

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch, whose order is drawn when its first batch is read.

        A trainer may have begun the epoch itself, see `EPOCH_BEGUN`; then the order is drawn before
        `iter`.
        """
        self._copy_settings()
        self._order.begin()
        self._reading, self._index = None, 0
        self._draws_first = vars(self._loader).pop(EPOCH_BEGUN, False)
        return self

    def state(self, *, ended: bool) -> LoaderState:
        """The position in the epoch, from which `resume` reads the same batches in the same order.

        Within an epoch: the random states before the order was drawn, and the number and digest of
        the batches since. Between two epochs: the states of the loader's own random generators.
        """
        order = self._order
        own = order.states()[_GLOBAL_GENERATORS:]
        if order.start_states is not None:
            state = self._state_before(self._index)
            if self.draws and not order.reads_ahead:
                state["generators"] = own  # the program may have drawn from them, too
            return state
        # A new iterator draws a seed for its workers, and running workers do not.
        has_workers = self._base.persistent_workers and self._base._iterator is not None
        return {
            "generators": own,
            "begun": has_workers or self._draws_first,
        }

    def state_before(self, index: int) -> LoaderState | None:
        """The state before a batch that was read, or None if unknown or reading draws nothing.

        None before the first batch too: the order is drawn together with that batch.
        """
        order = self._order
        if index == 0 or not order.reads_ahead:
            return None
        if order.start_states is None or order.planned is not None or not order.knows(index):
            return None
        return self._state_before(index)

    def _state_before(self, index: int) -> LoaderState:
        """The state within an epoch, after its first `index` batches."""
        order = self._order
        state = {"index": index, "random": order.start_states, "digest": order.digest(index)}
        if order.reads_ahead:
            state["ahead"] = order.states_ahead(index)
        return state

    def rows(self) -> list[int] | None:
        """The first indices of the batch that was read last, or None if they are no numbers."""
        item = self._order.item(self._index)
        try:
            items = item[:MAX_ROWS]
        except (TypeError, LookupError):
            items = [item]
        try:
            return [operator.index(each) for each in items] or None
        except TypeError:
            return None

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Restores a state. The order of the earlier batches is drawn again.

        Args:
            state: result of `state` or `state_before`.
            skip: number of batches to pass after the state. None of them is read.

        Returns:
            The rest of the epoch, and 0.

        Raises:
            DataError: the samplers give another order. The loader stays where it is.
        """
        order = self._order
        index = state.get("index")
        if index is None:
            self._resume_before_first(state)
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
                order.planned = []
                if not skip:
                    order.planned = list(state.get("ahead", ()))
            else:
                self._reading = self._begin()
            own = after[_GLOBAL_GENERATORS:]
            if not skip:
                own = state.get("generators", own)
            current[_GLOBAL_GENERATORS:] = own
        finally:
            order.set_states(current)
        self._index = index + skip
        self._draws_first = False
        return self, 0

    def _resume_before_first(self, state: LoaderState) -> None:
        """Restores a state before the first batch of an epoch."""
        self.start(0)
        self._order.set_states(state["generators"])
        self._draws_first = state["begun"]
        if not self._draws_first:
            self._base._iterator = None  # ends workers that were started later

    def __next__(self) -> AnyBatch:
        reading = self._reading
        if reading is None:
            reading = self._begin_reading()
        try:
            batch = next(reading)
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

    def _begin_reading(self) -> BatchIterator:
        """Begins to read an epoch at its first batch, or at the batch of a restored state."""
        order = self._order
        if self._draws_first:
            after = order.draw(order.states())
            self._reading = self._begin()
            order.set_states(after)
            return self._reading
        if order.planned is not None:
            order.planned.append(order.states())
        self._reading = self._begin()
        return self._reading

    def _copy_settings(self) -> None:
        """Copies what the loop may set, such as `collate_fn`, and Accelerate's count of epochs."""
        own = {_order_name(self._base), *_UNBEGUN_ATTRIBUTES}
        for name, value in vars(base_of(self._loader)).items():
            if name not in own:
                vars(self._base)[name] = value  # `setattr` of a DataLoader refuses some names
        if self._accelerated:
            self._copy.iteration = self._loader.iteration

    def can_read_again(self, index: int) -> bool:
        """Whether this rank alone can read a batch of the epoch again.

        False for the first batch of an epoch whose order the ranks have agreed on at its begin.
        Accelerate then sends the random state of the sampler to all ranks, and this rank does
        not know the state that it has received.

        Args:
            index: number of the batch in the epoch, from 0.
        """
        distributed = sys.modules["torch"].distributed
        is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
        return index > 0 or is_alone or not getattr(self._copy, "rng_types", None)

    def _begin(self) -> BatchIterator:
        """The iterator of the copy. Accelerate's iterator begins by reading its first batch."""
        batches = iter(self._copy)
        if not self._accelerated:
            return batches
        # With its first batch, Accelerate begins the epoch, exchanges random states and draws.
        exchanged = vars(self._copy)["rng_types"]
        if self.reads_again:
            vars(self._copy)["rng_types"] = None
        try:
            first = list(islice(batches, 1))
            return chain(first, batches)
        finally:
            vars(self._copy)["rng_types"] = exchanged


class _RecordedSampler:
    """The items of a sampler. Records the random states from which their order follows.

    The copied DataLoader has this object in place of its sampler or batch sampler, and iterates
    over it once in each epoch.

        random states ── the sampler draws the order ── item 1, item 2, ... ── taken by the loader
        `start_states`                                   `_recent`, with digests

    A loader of Accelerate reads one batch ahead, so an item is taken one step before its batch is
    used, and examples may draw numbers at that moment. Then (`reads_ahead`) the states before each
    of the last items are kept too, and are set again before the item is taken again.

    Args:
        sampler: the sampler or batch sampler.
        generators: random generators of the loader and its parts, besides the global ones.
        ahead: largest number of items that the loader reads ahead.
        reads_ahead: whether this process reads them, so that their examples may draw random
            numbers between the numbers of the steps.
    """

    def __init__(
        self,
        sampler: Iterable[Item],
        generators: list[Any],
        ahead: int,
        reads_ahead: bool,
    ) -> None:
        torch = sys.modules["torch"]  # imported, because the loader is of torch
        self._sampler = sampler
        self._sources: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
            (torch.get_rng_state, torch.set_rng_state),
        ]
        """How to read and to set the state of each random generator."""
        for each in generators:
            self._sources.append(
                (partial(generator_state, each), partial(set_generator_state, each))
            )
        self._ahead = ahead
        self.reads_ahead = reads_ahead
        self.begin()

    def begin(self) -> None:
        """Begins a new epoch, whose order is drawn when its first index is read."""
        self.start_states: RandomStateList | None = None
        """The states before the order was drawn, or None before that."""
        self.planned: list[RandomStateList] | None = None
        """After a resume: the states to set before each of the next items is read, else None."""
        self._before: deque[RandomStateList] = deque(maxlen=_MAX_EXACT_BATCHES)
        """If `reads_ahead`: the states before each of the last items was read."""
        self._drawn: Iterator[Item] | None = None
        """The rest of an order of `draw`, for `__iter__`, or None."""
        self._count = 0
        """Number of items that the loader has taken."""
        self._recent = _no_items(self._ahead)
        """The last items, each with the digest of all items up to it."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the sampler, such as `set_epoch` and `batch_size`, except its state."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Item]:
        if self._drawn is None:
            return self._recorded()
        return self._drawn

    def digest(self, count: int) -> tuple[int, int]:
        """The number of batches and the digest of their indices, after `count` batches."""
        return count, self._recent[count - self._count - 1][1]

    def item(self, count: int) -> Item:
        """The item before `count`, which is an index or a list of indices."""
        return self._recent[count - self._count - 1][0]

    def states_ahead(self, count: int) -> list[RandomStateList]:
        """The random states before Accelerate has read the item that follows the first `count`."""
        if self.planned is not None:
            return self.planned
        first = len(self._before) - (self._count - count)
        return list(self._before)[first:][:1]

    def knows(self, count: int) -> bool:
        """Whether the states before the item after the first `count` are known."""
        return self._count - len(self._before) <= count

    def draw(
        self, states: RandomStateList, skip: int = 0, digest: tuple[int, int] = (0, 0)
    ) -> RandomStateList:
        """Sets random states, draws an order and passes its first `skip` items.

        Args:
            states: the states of before the order was drawn.
            skip: number of items to pass.
            digest: number of items, and the digest that they must have. (0, 0) accepts any order.

        Returns:
            The random states after the order was drawn.

        Raises:
            DataError: the order is not the order of `digest`. The current order is unchanged.
        """
        self.set_states(states)
        items = iter(self._sampler)
        recent = _no_items(self._ahead)
        matches = not digest[0]
        for number in range(1, skip + 1):
            recent.append(_digested(next(items, None), recent))
            if (number, recent[-1][1]) == digest:
                matches = True
        first: list[Item] = []
        if not skip:
            # A sampler draws the order when its first item is read. Only this item is read, because
            # some samplers draw again at each item.
            first = list(islice(items, 1))
        if not matches:
            raise DataError(
                "the samplers do not give the same order again: they draw from a generator that is "
                "neither a global one nor an attribute of theirs, or the dataset has changed"
            )
        self.start_states = states
        self._count = skip
        self._recent = recent
        self._drawn = self._noted(chain(first, items))
        return self.states()

    def states(self) -> RandomStateList:
        """The current random states: of Python, NumPy and torch, then of the loader's own."""
        return [get() for get, _ in self._sources]

    def set_states(self, states: RandomStateList) -> None:
        """Sets random states.

        Args:
            states: result of `states`, or only its last part. Then the global random states stay.
        """
        first = len(self._sources) - len(states)
        for (_, set_state), state in zip(self._sources[first:], states, strict=True):
            set_state(state)

    def _recorded(self) -> Iterator[Item]:
        """Draws the order of a new epoch, and yields its items."""
        self.begin()
        self.start_states = self.states()
        yield from self._noted(iter(self._sampler))

    def _noted(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yields items, and notes each before the loader takes it."""
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
        if not self.planned:
            self.planned = None
            return
        if last:
            self.set_states(self.planned[-1])
            self.planned = None
            return
        self.set_states(self.planned[0])
        self.planned = self.planned[1:] or None


def _no_items(ahead: int) -> deque[tuple[Item, int]]:
    """The items of an epoch that has not begun: none, whose digest is 0."""
    return deque([(None, 0)], maxlen=ahead + _MAX_EXACT_BATCHES)


def _digested(item: Item, recent: deque[tuple[Item, int]]) -> tuple[Item, int]:
    """The item with the digest of all items up to it."""
    return item, zlib.crc32(repr(item).encode(), recent[-1][1])
