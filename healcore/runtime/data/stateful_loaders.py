"""The adapters of loaders that have a state: by `state_dict`, by an iterator, or by an index."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from healcore.runtime.data.loader_adapter import BatchIterator, LoaderAdapter
from healcore.runtime.data.loader_parts import (
    AnyBatch,
    AnyLoader,
    Indexed,
    LoaderState,
    random_generators_of,
    samplers_of,
)
from healcore.runtime.data.random_states import generator_state, set_generator_state


class StatefulLoaderAdapter(LoaderAdapter):
    """A loader with `state_dict` and `load_state_dict`: such as torchdata's StatefulDataLoader.

    A loaded state applies to the next `iter`. The random generators of the samplers are saved too.
    A StatefulDataLoader draws the order and the workers' seeds from one random generator, and its
    state records only where the shuffling began. So after `load_state_dict` alone the next epoch
    would have a different order.
    """

    kind = "loader"
    begins_again = True

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(loader)
        self._random_generators = random_generators_of(samplers_of(loader))
        self._at_start: list[Any] = []
        """The states of the random generators before the epoch has begun."""
        self.draws = not getattr(loader, "num_workers", 0)

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch, and keeps the states that the generators have before it."""
        self._at_start = self._generator_states()
        return super().start(epoch)

    def start_again(self, epoch: int) -> BatchIterator:
        """Begins an epoch from the states of its first begin, so that its order is the same."""
        for generator, state in zip(self._random_generators, self._at_start, strict=True):
            set_generator_state(generator, state)
        return self.start(epoch)

    def _generator_states(self) -> list[Any]:
        return [generator_state(each) for each in self._random_generators]

    def state(self, *, ended: bool) -> LoaderState:
        """The states of the loader and of its generators, and whether the epoch has ended."""
        return {
            "loader": self._loader.state_dict(),
            "generators": self._generator_states(),
            "ended": ended,
        }

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Loads the state, calls `iter`, and then sets the generators, which `iter` may draw from.

        Returns:
            The rest of the epoch, and `skip`: the caller reads and drops these batches.
        """
        loader: Any = self._loader
        loader.load_state_dict(state["loader"])
        batches = iter(loader)
        for generator, saved in zip(self._random_generators, state["generators"], strict=True):
            set_generator_state(generator, saved)
        if self._random_generators and state["ended"]:
            # `iter` has drawn the order of the next epoch before the random generators were
            # set.
            batches = iter(loader)
        return batches, skip


class StatefulIteratorAdapter(LoaderAdapter):
    """A loader whose iterator has a state, such as Grain's `get_state` and `set_state`.

    The loader's order may depend on a value that its iterator's state lacks, such as a count of
    epochs. So the state at the beginning of each epoch is kept, for a rewind to it.
    """

    kind = "iterator"
    draws = True
    begins_again = True

    def __init__(self, loader: AnyLoader, first: BatchIterator, names: tuple[str, str]) -> None:
        super().__init__(loader, first=first)
        self._current = first
        self._get, self._set = names
        self._beginnings: dict[int, LoaderState] = {}
        """Epoch -> state of the iterator before its first batch."""

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch. If it has begun before, it begins in the same state again."""
        state = self._beginnings.get(epoch)
        if state is not None:
            batches, _ = self.resume(copy.deepcopy(state), 0)
            return batches
        self._current = super().start(epoch)
        with suppress(Exception):  # `state` raises it again
            self._beginnings[epoch] = copy.deepcopy(self.state(ended=False))
        return self._current

    def state(self, *, ended: bool) -> LoaderState | None:
        """The state of the iterator, or None between two epochs."""
        if ended:
            return None
        get_state = getattr(self._current, self._get)
        return get_state()

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Sets the state on the existing iterator: a new iterator could shuffle in another way.

        Returns:
            The rest of the epoch, and `skip`: the caller reads and drops these batches.
        """
        if self._first is not None:
            self._current = super().start(0)
        set_state = getattr(self._current, self._set)
        set_state(state)
        return self._current, skip


class IndexedAdapter(LoaderAdapter, Iterator[AnyBatch]):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    begins_again = True
    _loader: Indexed[AnyBatch]
    _next = 0

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(loader)
        self.draws = not isinstance(loader, list | tuple | range)

    def start(self, epoch: int) -> BatchIterator:
        """Begins with index 0."""
        self._next = 0
        return self

    def state(self, *, ended: bool) -> int | None:
        """The index of the next batch, or None between two epochs."""
        if ended:
            return None
        return self._next

    def resume(self, state: int, skip: int) -> tuple[BatchIterator, int]:
        """Moves to the index of a state, and passes `skip` batches without reading them."""
        self._next = state + skip
        return self, 0

    def __next__(self) -> AnyBatch:
        loader: Any = self._loader
        at = self._next
        has_length = hasattr(loader, "__len__")
        if has_length and at >= len(loader):
            raise StopIteration
        try:
            batch = loader[at]
        except Exception as error:  # an unreadable item counts as read, an interrupted one does not
            if isinstance(error, IndexError) and not has_length:
                raise StopIteration from None
            self._next = at + 1
            raise
        self._next = at + 1
        return batch
