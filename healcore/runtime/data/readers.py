"""Readers: how a loader of each kind begins an epoch, and returns to a place in it.

kind of loader                                   reader            returns to a place by
-----------------------------------------------  ----------------  ---------------------------
a DataLoader of a map-style dataset              `TorchReader`     drawing its order again
a function that makes a loader                   `FunctionReader`  calling the function again
`state_dict` and `load_state_dict`               `StatefulReader`  these methods
an iterator with `get_state` or `state_dict`     `StatefulReader`  these methods
a sequence, or `__getitem__` without `__iter__`  `IndexReader`     its index
the blocks of `Healer.scan`                      `ScanBlocks`      the number of their updates
anything else to iterate over                    `Reader`          cannot return

`Reader` is the protocol, `reader_for` chooses, and `torch_reader` has the reader of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from healcore.runtime.data.loaders import class_name, generators_of, is_type, samplers_of
from healcore.runtime.data.positions import DataError
from healcore.runtime.data.random_states import (
    RandomStates,
    generator_states,
    random_states,
    set_generator_states,
    set_random_states,
)

ReaderState = Any
"""The state of a reader. A checkpoint holds it as text of `runtime.store.values`, so it consists of
numbers, texts, bytes, containers, and arrays of NumPy, torch or JAX."""
_STATE = "state_dict", "load_state_dict"
_RANDOM_SAMPLERS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
_REWINDING = (
    "pass a list, a torch DataLoader of a map-style dataset, torchdata's StatefulDataLoader with "
    "shuffle=True, a Grain dataset, a loader or an iterator with an exact state_dict and "
    "load_state_dict, or a function that makes the stream again: lambda: zip(a, b)"
)
"""What can be rewound instead."""


class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `Cursor` raises the error.

    A generator that raises is finished. This object passes through the generators of readers,
    wrappers and trainers as a batch, so the next batches can still be read.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error


def catch_unreadable(batches: Iterator[Any]) -> Iterator[Any]:
    """Yields batches, and an `UnreadableBatch` where reading raises."""
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            batch = UnreadableBatch(error)
        yield batch


class Reader:
    """Begins the epochs of a loader. This base class is for loaders that cannot be rewound.

    Args:
        loader: the user's loader.
        obstacle: why the loader cannot be rewound, or an empty string: a short reason, and after a
            colon what to write instead.
        first: the batches of the first epoch, if it has begun already because the iterator had to
            be examined. Otherwise None.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        replays: whether the state between two epochs is known before the next one begins, also if
            a `break` has left the epoch before.
        generators: the random generators that `begin` draws from, besides the global ones.
        begins_alone: whether a rank alone can begin an epoch: nothing is exchanged with others.
    """

    kind = "forward"
    replays = False
    begins_alone = True

    def __init__(
        self, loader: Any, *, obstacle: str = "", first: Iterator[Any] | None = None
    ) -> None:
        self.loader = loader
        self.obstacle = obstacle
        self.generators: list[Any] = []
        self._first = first

    def begin(self) -> Iterator[Any]:
        """Begins an epoch, and returns its batches."""
        first, self._first = self._first, None
        if first is None:
            return iter(self.loader)
        return first

    def state(self, index: int | None, *, newest: bool) -> ReaderState | None:
        """The state before a batch of this epoch, or None if it is unknown.

        Args:
            index: number of the batch in the epoch, or None for the state between two epochs.
            newest: whether it is the next batch.
        """
        return None

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Returns to a place in an epoch.

        Args:
            state: result of `state` in this or in an earlier process.
            index: number of the next batch in the epoch.

        Returns:
            The rest of the epoch, or None if the epoch begins when its first batch is read; and the
            index at which it is. The caller reads and drops the batches from there to `index`.

        Raises:
            DataError: the epoch has another order now. The reader stays where it is.
        """
        return self.begin(), 0

    def rows(self, index: int) -> list[int] | None:
        """The dataset's indices of the batch before `index`, for events, or None if unknown."""
        return None


class StatefulReader(Reader):
    """A loader or an iterator with a state: a StatefulDataLoader, or Grain.

    A StatefulDataLoader draws the order and the workers' seeds from one random generator, and its
    state records only where the shuffling began. So the generators of the samplers are part of a
    state.

    Args:
        loader: the user's loader.
        names: the methods that return the state and set it.
        first: the iterator of the first epoch if iterators have the state, else None. The state is
            set on the existing iterator: a new one could shuffle in another way.
    """

    def __init__(
        self, loader: Any, names: tuple[str, str] = _STATE, first: Iterator[Any] | None = None
    ) -> None:
        super().__init__(loader, first=first)
        self._get, self._set = names
        self._of_iterator = first is not None
        if self._of_iterator:
            self.kind = "iterator"
            self._owner = first
        else:
            self.kind = "loader"
            self._owner = loader
        if self._of_iterator:
            self.generators = []
        else:
            self.generators = generators_of(*samplers_of(loader))

    def begin(self) -> Iterator[Any]:
        """Begins an epoch with a new iterator."""
        batches = super().begin()
        if self._of_iterator:
            self._owner = batches
        return batches

    def state(self, index: int | None, *, newest: bool) -> ReaderState | None:
        """The state at the next batch only; of a loader also between two epochs."""
        if not newest or (index is None and self._of_iterator):
            return None
        own = getattr(self._owner, self._get)()
        return {"index": index, "own": own, "random": generator_states(self.generators)}

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Sets the state. After an end, the next `iter` begins the next epoch."""
        self._first = None
        getattr(self._owner, self._set)(state["own"])
        batches, index = None, state["index"]
        if index is not None or self.generators:  # iter() draws, or ends the epoch
            if self._of_iterator:
                batches = self._owner
            else:
                batches = iter(self.loader)
        set_generator_states(self.generators, state["random"])
        if index is None:
            return (None, 0)
        return (batches, index)


class IndexReader(Reader):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    replays = True

    def begin(self) -> Iterator[Any]:
        """Begins with index 0."""
        return self._from(0)

    def state(self, index: int | None, *, newest: bool) -> int | None:
        """The index."""
        return index

    def resume(self, state: int, index: int) -> tuple[Iterator[Any], int]:
        """Moves to the index. No batch before it is read."""
        return self._from(index), index

    def _from(self, index: int) -> Iterator[Any]:
        """Yields the batches from an index on."""
        has_length = hasattr(self.loader, "__len__")
        for at in count(index):
            if has_length and at >= len(self.loader):
                return
            try:
                batch = self.loader[at]
            except Exception as error:
                if isinstance(error, IndexError) and not has_length:
                    return
                batch = UnreadableBatch(error)
            yield batch


class ScanBlocks(Reader, Iterator[Any]):
    """The blocks of updates that JAX compiles as a whole: the loader of `Healer.scan`.

    A scan has no data: its updates read what they need from their state. A checkpoint has to hold
    how many updates are done, and a rollback has to begin a block again. A loader of blocks gives
    both. It yields the number of each block's last update, which a `loss_fn` gets as its batch:

        blocks = ScanBlocks(10, every=4)
        [(blocks.first, int(last)) for last in blocks]  # [(0, 3), (4, 7), (8, 9)]

    It has no length: a restart may choose blocks of another size. It is an iterator, which has one
    epoch: a restart with more updates continues after the last block.

    Args:
        updates: number of updates in all blocks.
        every: number of updates in a block. The last block may have fewer.

    Attributes:
        first: number of the block's first update.
        count: number of updates in the block.

    Raises:
        ValueError: a number is not a whole number >= 1.
    """

    kind = "scan"
    replays = True

    def __init__(self, updates: int, every: int) -> None:
        super().__init__(self)
        for name, value in (("steps", updates), ("every", every)):
            is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not is_whole or value < 1:
                raise ValueError(f"{name} is a whole number >= 1, not {value!r:.80}")
        self.updates, self.every = int(updates), int(every)
        self.first = self.count = self._done = 0

    def __next__(self) -> np.int32:
        if self._done >= self.updates:
            raise StopIteration
        self.first = self._done
        self.count = min(self.every, self.updates - self._done)
        self._done += self.count
        return np.int32(self._done - 1)

    def begin(self) -> Iterator[Any]:
        """Begins with the first update."""
        self._done = 0
        return self

    def state(self, index: int | None, *, newest: bool) -> int:
        """The number of updates before the next block, or else before the newest block."""
        if newest:
            return self._done
        return self.first

    def resume(self, state: int, index: int) -> tuple[Iterator[Any], int]:
        """Continues after the updates of a state."""
        self._done = state
        return self, index


class FunctionReader(Reader):
    """Reads what a function makes: a generator, a `zip` or another stream that cannot go back.

    The function is called for each epoch. To return to a place, it is called again with the random
    states of the first call, so that it draws the same order. The new stream is moved by its own
    state where it has one, otherwise by reading and dropping batches. A stream that draws at each
    batch needs a random generator of its own: the steps draw from the global ones.
    """

    kind = "function"
    replays = True

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self._inner = Reader(None)
        """The reader of what the function has made for this epoch."""
        self._random: RandomStates = {}
        """The random states before the call."""

    def begin(self) -> Iterator[Any]:
        """Calls the function, and begins an epoch of what it returns."""
        self._random = random_states()
        self._inner = reader_for(self.loader())
        return self._inner.begin()

    def state(self, index: int | None, *, newest: bool) -> ReaderState | None:
        """The random states of the call, and the state of the stream if it is known."""
        if not index:
            return {}
        if self._inner.obstacle:
            own = None
        else:
            own = self._inner.state(index, newest=newest)
        return {"random": self._random, "own": own}

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Calls the function again. Raises DataError if it returns what it has returned before."""
        if not state:
            return None, 0
        set_random_states(state["random"])
        before = self._inner.loader
        batches = self.begin()
        if self._inner.loader is before and isinstance(before, Iterator):
            raise DataError(
                "the function has returned the iterator that it had returned before, which cannot "
                "go back: it has to make a new one at each call"
            )
        if state["own"] is None:
            return batches, 0
        return self._inner.resume(state["own"], index)

    def rows(self, index: int) -> list[int] | None:
        """The rows of the stream's batch."""
        return self._inner.rows(index)


def reader_for(loader: Any) -> Reader:
    """Chooses the reader of a loader by its kind. A loader may be its own reader.

    Args:
        loader: the user's loader. If only its iterator can have a state, the first epoch begins
            here, which may draw random numbers.
    """
    from healcore.runtime.data.torch_reader import TorchReader, is_replayable

    if isinstance(loader, Reader):
        return loader
    if is_function(loader):
        return FunctionReader(loader)
    if is_replayable(loader):
        return TorchReader(loader)
    has_state = _has_methods(loader, *_STATE)
    obstacle = _obstacle(loader, has_state=has_state)
    if not obstacle:
        return StatefulReader(loader)
    if has_state:
        return Reader(loader, obstacle=obstacle)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return IndexReader(loader)
    first = None
    if not is_type(loader, "torch.utils.data", "DataLoader"):
        first = iter(loader)
        for names in (("get_state", "set_state"), _STATE):
            if _has_methods(first, *names):
                return StatefulReader(loader, names, first)
    return Reader(loader, obstacle=obstacle, first=first)


def _has_methods(thing: object, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def _obstacle(loader: Any, *, has_state: bool) -> str:
    """Why a loader has no `state_dict` that determines what follows, and what to use instead.

    A loader with such a state would go on with other batches, without a warning.
    """
    name, missing = class_name(loader), ""
    if not has_state:
        return f"{name} cannot be rewound: {_REWINDING}"
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher", "DataLoaderAdapter"):
        missing = "the position of this rank"
    elif is_type(loader, "torchdata.nodes", "Loader"):
        missing = "that it reads ahead into the next epoch"
    elif getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        missing = "the order of in_order=False"
    elif _has_shuffle_buffer(getattr(loader, "dataset", loader)):
        missing = "its shuffle buffer"
    for sampler in samplers_of(loader):
        if _draws_unrecorded(sampler):
            missing = f"the order of {class_name(sampler)}"
    if not missing:
        return ""
    return f"the state of {name} does not record {missing}: {_REWINDING}"


def _draws_unrecorded(sampler: Any) -> bool:
    """Whether a sampler draws a new order in every epoch, and does not record it.

    A restored torchdata loader then skips forward through a different order, without a warning.
    """
    if hasattr(sampler, "state_dict") or is_type(sampler, "torchdata", "RandomSampler"):
        return False
    return bool(generators_of(sampler)) or is_type(sampler, "torch.utils.data", *_RANDOM_SAMPLERS)


def _has_shuffle_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which its state does not have."""
    parts = [stream]
    for part in parts:  # the list grows by the streams inside its parts
        if is_type(part, "datasets", "BufferShuffledExamplesIterable"):
            return True
        inner = [getattr(part, name, None) for name in ("_ex_iterable", "ex_iterable")]
        inner += getattr(part, "ex_iterables", ())
        parts += [each for each in inner if each is not None]
    return False


def is_function(loader: Any) -> bool:
    """Whether a loader is a function that makes what is iterated over.

    A class is not such a function, and neither is an object that can be iterated over itself.
    """
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    return callable(loader) and not isinstance(loader, type) and not is_iterable


def function_name(function: object) -> str:
    """The name of a function for messages; the name of the class for other callable objects."""
    return getattr(function, "__qualname__", type(function).__qualname__)
