"""Reads a `torch.utils.data.DataLoader`, which records no position of its own.

The samplers draw the order of an epoch from random generators when the epoch begins. A position is
the states of the generators at that moment, and the number of batches read since. To return, the
states are set, the samplers draw the order again, and the indices of the earlier batches are passed
without reading the data. This includes loaders that Accelerate, Fabric and trainers make from a
DataLoader.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np

from healcore.events.kinds import MAX_ROWS
from healcore.runtime.data.loaders import generators_of, is_type, samplers_of
from healcore.runtime.data.positions import DataError
from healcore.runtime.data.random_states import (
    RandomStates,
    generator_states,
    random_states,
    set_generator_states,
    set_random_states,
)
from healcore.runtime.data.readers import Reader, ReaderState, catch_unreadable

EPOCH_BEGUN = "_healcore_begun"
"""Attribute of a loader whose next epoch other code has begun: `iter` has drawn a seed."""
_KEPT_ITEMS = 64
"""Number of batches whose rows and digests are kept, besides those that are read ahead."""


class _Inner:
    """A DataLoader inside a wrapper, whose batches come from the reader."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader = loader
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._batches


def _unwrapped(loader: Any) -> tuple[Any, str]:
    """The DataLoader inside a wrapper, and the wrapper's attribute that has it.

    The loader itself and "" without a wrapper.
    """
    if is_type(loader, "accelerate.data_loader", "DataLoaderShard"):
        return loader.base_dataloader, "base_dataloader"
    if is_type(loader, "lightning", "_FabricDataLoader"):
        return loader._dataloader, "_dataloader"
    return loader, ""


def is_replayable(loader: Any) -> bool:
    """Whether a loader is or wraps a DataLoader of a map-style dataset, with torch's `__iter__`.

    The order of such a loader follows from the random states at the start of the epoch alone. A
    subclass with an `__iter__` of its own may do anything, and is read as any other loader.
    """
    package, (base, attribute) = "torch.utils.data", _unwrapped(loader)
    if not is_type(base, package, "DataLoader") or not getattr(base, "in_order", True):
        return False
    has_own_iter = type(base).__iter__ is not sys.modules[package].DataLoader.__iter__
    if has_own_iter and attribute != "base_dataloader":
        return False
    return not is_type(base.dataset, package, "IterableDataset")


def _with(loader: Any, **attributes: Any) -> Any:
    """A shallow copy with other attributes, which `setattr` of a DataLoader refuses."""
    copied = object.__new__(type(loader))
    vars(copied).update(vars(loader) | attributes)
    return copied


class TorchReader(Reader):
    """Reads copies of a loader for which `is_replayable` is true; their sampler records the order.

    The user's loader keeps its own sampler, and can be read at the same time, for example by an
    evaluation. Each epoch has a new copy, because the loop may set attributes between two epochs.
    """

    kind = "dataloader"
    replays = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        base, self._attribute = _unwrapped(loader)
        if base.batch_sampler is None:
            self._order_name = "sampler"
        else:
            self._order_name = "batch_sampler"
        self._generators = generators_of(loader, base, base.dataset, *samplers_of(loader))
        self._reads_ahead = self._attribute == "base_dataloader" and not base.num_workers
        self._before: dict[int, RandomStates] = {}
        """Number of batches -> the random states before a wrapper has read the next one."""
        ahead = base.num_workers * (base.prefetch_factor or 0) + 1  # a wrapper reads one ahead
        order = getattr(base, self._order_name)
        self._order = _RecordedOrder(order, self._generators, ahead + _KEPT_ITEMS)
        self._copy: Any = None
        """The copy of the DataLoader that was read last, or None."""
        self._next_is_seedless = False
        """Whether `iter` draws no seed for the next epoch, although the copy has no workers yet."""
        self._is_seedless = False
        """Whether `iter` has drawn no seed for the epoch that has begun."""
        self._begun: list[Any] = []
        """The states of the generators before this epoch."""

    @property
    def _workers(self) -> Any:
        """The iterator with persistent workers, which draws no seed in another epoch, or None."""
        if getattr(self._copy, "persistent_workers", False):
            return self._copy._iterator
        return None

    def begin(self) -> Iterator[Any]:
        """Begins an epoch, whose order is drawn when its first batch is read."""
        is_marked = vars(_unwrapped(self.loader)[0]).pop(EPOCH_BEGUN, False)
        is_simulated = (self._next_is_seedless or is_marked) and self._workers is None
        self._is_seedless = is_simulated or self._workers is not None
        self._next_is_seedless = False
        self._order.reset()
        self._before, self._begun = {}, generator_states(self._generators)
        if not is_simulated:
            return self._batches()
        return self._again({"random": random_states(self._generators), "digest": None}, 0)

    def state(self, index: int | None, *, newest: bool) -> ReaderState:
        """The random states of before the order was drawn, and the digest of the last batch's rows.

        Before the first batch of an epoch the order is not drawn yet. Besides, the states of the
        loader's own generators, unless batches are read ahead. If Accelerate has read the next
        batch already, the random states of before that.
        """
        if index is None:
            is_seedless = self._next_is_seedless or self._workers is not None
            return {"seedless": is_seedless, "own": generator_states(self._generators)}
        if index == 0:
            return {"seedless": self._is_seedless, "own": self._begun}
        in_order = not self._attribute and self._copy.num_workers == 0
        return {
            "random": self._order.start,
            "digest": _digest(self._order.items.get(index)),
            "ahead": self._before.get(index) if self._reads_ahead else None,
            "own": generator_states(self._generators) if in_order else None,
        }

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Draws the order of the epoch again, and passes the indices of the earlier batches.

        The digest notices a sampler that draws from an unknown source, before a batch is read.
        """
        batches = None
        if "seedless" not in state:
            batches = self._again(state, index)
        else:
            self._next_is_seedless = state["seedless"]
            if not self._next_is_seedless:
                self._copy = None  # ends workers that were started later
        if state["own"] is not None:
            set_generator_states(self._generators, state["own"])
        return batches, index

    def _again(self, state: ReaderState, index: int) -> Iterator[Any]:
        """Begins an epoch whose order is drawn before the first seed."""
        after = self._order.draw(state["random"], index, state["digest"])
        if state.get("ahead"):
            self._before = {index: state["ahead"]}
        else:
            self._before = {}
        batches = self._batches(index, begins_now=True)
        set_random_states(after, self._generators)
        return batches

    def _batches(self, index: int = 0, *, begins_now: bool = False) -> Iterator[Any]:
        """The batches of a new copy of the loader.

        Args:
            index: number of the first batch in the epoch.
            begins_now: whether a DataLoader in a wrapper begins before the first batch is read.
        """
        loader, base = self.loader, _unwrapped(self.loader)[0]
        # Attributes of a DataLoader that has not begun an epoch, also of a StatefulDataLoader.
        new = {"_iterator": self._workers, "_initial_iter_for_state_dict": False}
        copied = self._copy = _with(base, **{self._order_name: self._order}, **new)
        if not self._attribute:
            return iter(copied)
        batches = self._noted(iter(copied) if begins_now else copied, index)
        # After a return the random states are known, and other ranks may not begin again.
        if index:
            own = {"rng_types": None}
        else:
            own = {}
        return _read_through(loader, {self._attribute: _Inner(copied, batches), **own})

    def _noted(self, batches: Iterable[Any], index: int) -> Iterator[Any]:
        """The batches for a wrapper, which get an `UnreadableBatch` where reading raises.

        Accelerate reads a batch before the step with the batch before, and its examples may draw
        numbers then. So after a return, the first batch is read with the random states of before,
        and the step continues with its own.
        """
        caught = catch_unreadable(iter(batches))
        while True:
            now = random_states(self._generators)
            before = self._before.setdefault(index, now)
            if before is not now:
                set_random_states(before, self._generators)
            batch = list(islice(caught, 1))
            if before is not now:
                set_random_states(now)  # the step draws from no generator of the loader
            if not batch:
                return
            yield batch[0]
            self._before.pop(index - _KEPT_ITEMS, None)
            index += 1

    def rows(self, index: int) -> list[int] | None:
        """The first indices of the batch, or None if they are no numbers."""
        item: Any = self._order.items.get(index)
        if isinstance(item, list | tuple):
            rows = item[:MAX_ROWS]
        else:
            rows = [item]
        is_known = all(isinstance(row, int | np.integer) for row in rows)
        if rows and is_known:
            return [int(row) for row in rows]
        return None

    @property
    def begins_alone(self) -> bool:  # type: ignore[override]
        """At the begin of an epoch Accelerate sends random states to the other ranks."""
        distributed = sys.modules["torch"].distributed
        is_alone = not distributed.is_initialized() or distributed.get_world_size() == 1
        return is_alone or not getattr(self.loader, "rng_types", None)


def _read_through(loader: Any, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """The batches of a DataLoader as a copied wrapper passes them, with the wrapper's counts."""
    wrapper = _with(loader, **attributes)
    if hasattr(loader, "_num_iter_calls"):
        loader._num_iter_calls += 1
    yield from wrapper
    if hasattr(loader, "iteration"):
        loader.iteration = wrapper.iteration


Item = Any
"""What a sampler yields: the index of a row, or the list of the indices of a batch."""


def _digest(item: Item | None) -> int | None:
    """The CRC of an item, or None for no item."""
    if item is None:
        return None
    return zlib.crc32(repr(item).encode())


class _RecordedOrder:
    """The items of a sampler, and the random states from which their order follows.

    The copied DataLoader has this object in place of its sampler or batch sampler, and iterates
    over it once in each epoch.

    Args:
        sampler: the sampler or batch sampler.
        generators: random generators of the loader and its parts, besides the global ones.
        kept: number of items that are kept.

    Attributes:
        start: the random states before the order of this epoch was drawn.
        items: number of items -> the last of them.
    """

    def __init__(self, sampler: Iterable[Item], generators: list[Any], kept: int) -> None:
        self._sampler = sampler
        self._generators = generators
        self._kept = kept
        self.reset()

    def reset(self) -> None:
        """Begins a new epoch, whose order is drawn when its first index is read."""
        self.start: RandomStates = {}
        self.items: dict[int, Item] = {}
        self._drawn: Iterator[Item] | None = None
        """The rest of an order of `draw`, until it is read, or None."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the sampler, such as `set_epoch` and `batch_size`, except its state."""
        if name.startswith("_") or name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Item]:
        return self._drawn or self._begun()

    def draw(self, states: RandomStates, skip: int, digest: int | None) -> RandomStates:
        """Sets random states, draws an order and passes its first `skip` items.

        Args:
            states: the random states before the order was drawn.
            skip: number of items to pass.
            digest: the digest of the last one of them, or None if it is unknown.

        Returns:
            The random states after the order was drawn.

        Raises:
            DataError: the order is not the order of `digest`. The current order is unchanged.
        """
        set_random_states(states, self._generators)
        items = iter(self._sampler)
        passed = deque(islice(items, skip), maxlen=1)
        if digest is not None and [digest] != [_digest(each) for each in passed]:
            raise DataError(
                "the samplers do not give the same order again: they draw from a generator that is "
                "neither a global one nor an attribute of theirs, or the dataset has changed"
            )
        # A sampler draws the order when its first item is read. Only this item is read, because
        # some samplers draw again at each item.
        if skip:
            first = []
        else:
            first = list(islice(items, 1))
        self.start, self.items = states, dict(zip([skip], passed, strict=False))
        self._drawn = self._noted(chain(first, items), skip)
        return random_states(self._generators)

    def _begun(self) -> Iterator[Item]:
        """Draws the order of a new epoch, and yields its items."""
        self.reset()
        self.start = random_states(self._generators)
        yield from self._noted(iter(self._sampler), 0)

    def _noted(self, items: Iterator[Item], count: int) -> Iterator[Item]:
        """Yields items, and keeps each before the loader takes it."""
        self._drawn = None  # the next `iter` begins another epoch; with workers, `iter` runs twice
        for item in items:
            count += 1
            self.items[count] = item
            self.items.pop(count - self._kept, None)
            yield item
