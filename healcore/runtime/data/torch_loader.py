"""Rewinds a plain `torch.utils.data.DataLoader`, which records no position of its own.

The order of an epoch follows from the random numbers that the samplers draw when the epoch begins.
So the random states at that moment and the number of batches read are a position. A rewind draws
the order again, and passes the earlier batches by index, without reading the data.
"""

from __future__ import annotations

import copy
import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

from healcore.runtime.data.loader_adapters import LoaderAdapter, is_type, samplers_of
from healcore.runtime.data.position import DataError

_END = object()


def is_replayable(loader: Any) -> bool:
    """Whether a loader is a DataLoader of torch with a map-style dataset.

    A subclass with an `__iter__` of its own is not.
    """
    package = "torch.utils.data"
    bases = (each for each in type(loader).__mro__ if each.__module__.startswith(package))
    base = next((each for each in bases if each.__name__ == "DataLoader"), None)
    return (
        base is not None
        and type(loader).__iter__ is base.__iter__
        and not is_type(loader.dataset, package, "IterableDataset")
        and getattr(loader, "in_order", True)
    )


class TorchLoader(LoaderAdapter):
    """Reads a copy of the loader, whose sampler is replaced by a recorded order."""

    kind = "dataloader"
    by_index = False

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._copy, self._order = _recorded(loader)
        self._reading: Iterator[Any] | None = None
        """The batches of the epoch, or None before the first one is read and after the last one."""
        self._index = 0
        self._has_workers = False
        """Whether persistent workers were running before the epoch that `resume` begins again."""

    def start(self) -> Iterator[Any]:
        """Begins an epoch when its first batch is read."""
        self._reading, self._index, self._has_workers = None, 0, False
        self._order.begin()
        return self

    def state(self) -> dict[str, Any]:
        """Random states before the epoch, and number and digest of the batches read from it."""
        if self._reading is None:
            running = self._copy._iterator is not None
            return {"generators": self._order.generator_states(), "workers": running}
        digest = self._order.digest(self._index)
        return {"index": self._index, "random": self._order.random, "digest": digest}

    state_between = state

    def advanced(self, state: Any, count: int) -> Any:
        """The state `count` batches later, or None before the epoch's first batch is read."""
        return {**state, "index": state["index"] + count} if "index" in state else None

    def resume(self, state: Any) -> Iterator[Any]:
        """Restores a state. The order of the earlier batches is drawn again.

        Raises:
            DataError: the samplers give another order. The loader stays where it is.
        """
        index = state.get("index")
        at_index = self._reading is not None and self._index == index
        if at_index and [*state["digest"]] == [*self._order.digest(self._index)]:
            return self
        loader, order = _recorded(self._loader)
        if index is None:
            order.set_generators(state["generators"])
            reading, self._has_workers = None, state["workers"]
        else:
            current = _global_states()
            try:
                after = order.draw(state["random"], index, tuple(state["digest"]))
                reading = iter(loader)
            finally:
                _set_global_states(current)
            order.set_generators(after["generators"])
        self._copy, self._order, self._reading, self._index = loader, order, reading, index or 0
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._reading is None and self._has_workers:
            # A new iterator draws a seed for its workers, and running workers do not.
            after = self._order.draw(self._order.states())
            self._reading = iter(self._copy)
            _set_global_states(after)
            self._order.set_generators(after["generators"])
        elif self._reading is None:
            self._reading = iter(self._copy)
        try:
            batch = next(self._reading)
        except StopIteration:
            self._reading = None
            raise
        except Exception:  # the loader continues after a batch that cannot be read
            self._index += 1
            raise
        self._index += 1
        return batch


def _recorded(loader: Any) -> tuple[Any, _Order]:
    """A copy of a loader whose sampler is a recorded order, and this order."""
    parts = {id(part): part for part in (loader, *samplers_of(loader)) if part is not None}
    owned = [getattr(part, "generator", None) for part in parts.values()]
    generators = {id(each): each for each in owned if hasattr(each, "get_state")}
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    ahead = loader.num_workers * (loader.prefetch_factor or 0)
    order = _Order(getattr(loader, name), [*generators.values()], ahead)
    copied = copy.copy(loader)
    vars(copied).update({name: order, "_iterator": None})  # setattr refuses another sampler
    return copied, order


class _Order:
    """The indices of a sampler. Records the random states from which their order follows.

    Attributes:
        random: random states before the order of this epoch was drawn, or None.
    """

    def __init__(self, sampler: Iterable[Any], generators: list[Any], ahead: int) -> None:
        self._sampler = sampler
        self._generators = generators
        """Generators of the loader and its samplers. The global generators are recorded too."""
        self.random: dict[str, Any] | None = None
        self._drawn: Iterator[Any] | None = None
        self._count = 0
        self._digests = deque([0], maxlen=ahead + 2)
        """Digests of all indices up to each of the last items; workers read `ahead` items ahead."""

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return self._recorded() if self._drawn is None else self._drawn

    def begin(self) -> None:
        """Begins a new epoch, whose order is drawn when its first index is read."""
        self.random, self._drawn, self._count = None, None, 0
        self._digests.clear()
        self._digests.append(0)

    def digest(self, count: int) -> tuple[int, int]:
        """The number of batches and the digest of their indices, after `count` batches."""
        return count, self._digests[-1 - (self._count - count)]

    def draw(
        self, states: dict[str, Any], skip: int = 0, digest: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        """Sets random states, draws an order and passes its first `skip` items.

        Returns:
            The random states after the order was drawn.

        Raises:
            DataError: the order is not the order of `digest`.
        """
        _set_global_states(states)
        self.set_generators(states["generators"])
        self.random = states
        items, (checked, expected) = iter(self._sampler), digest
        matches = checked == 0
        for number in range(1, skip + 1):
            self._seen(next(items, None))
            matches |= number == checked and self._digests[-1] == expected
        first = next(items, _END)  # samplers draw when their first item is read
        if not matches:
            raise DataError(
                "the samplers do not give the same order again: they draw from a generator that is "
                "neither a global one nor their attribute `generator`, or the dataset has changed"
            )
        self._drawn = self._noted(items if first is _END else chain([first], items))
        return self.states()

    def states(self) -> dict[str, Any]:
        """The current random states."""
        return {**_global_states(), "generators": self.generator_states()}

    def generator_states(self) -> list[Any]:
        """The current states of `generators`."""
        return [each.get_state() for each in self._generators]

    def set_generators(self, states: list[Any]) -> None:
        """Sets the states of `generators`."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _recorded(self) -> Iterator[Any]:
        self.random = self.states()
        yield from self._noted(iter(self._sampler))

    def _noted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._seen(item)
            yield item

    def _seen(self, item: Any) -> None:
        self._count += 1
        self._digests.append(zlib.crc32(repr(item).encode(), self._digests[-1]))


def _global_states() -> dict[str, Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002 -- the global generator
    torch = sys.modules["torch"]  # imported, because the loader is of torch
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def _set_global_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
    sys.modules["torch"].set_rng_state(states["torch"])
