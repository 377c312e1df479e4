"""Chooses the reader of a loader; and `FunctionReader`, which reads what a function makes.

kind of loader                                   reader            returns to a place by
-----------------------------------------------  ----------------  ---------------------------
a DataLoader of a map-style dataset              `TorchReader`     drawing its order again
a function that makes a loader                   `FunctionReader`  calling the function again
`state_dict` and `load_state_dict`               `StatefulReader`  these methods
an iterator with `get_state` or `state_dict`     `IteratorReader`  these methods
a sequence, or `__getitem__` without `__iter__`  `IndexReader`     its index
anything else to iterate over                    `Reader`          cannot return
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from healcore.runtime.data.loaders import class_name, generators_of, is_type, samplers_of
from healcore.runtime.data.positions import DataError, UnusableLoader
from healcore.runtime.data.random_states import RandomStates, random_states, set_random_states
from healcore.runtime.data.readers import (
    IndexReader,
    IteratorReader,
    Reader,
    ReaderState,
    RewindObstacle,
    StatefulReader,
)
from healcore.runtime.data.torch_reader import TorchReader, is_replayable

_RANDOM_SAMPLERS = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
_REWINDING = (
    "pass a list, a torch DataLoader of a map-style dataset, torchdata's StatefulDataLoader with "
    "shuffle=True, a Grain dataset, a loader or an iterator with an exact state_dict and "
    "load_state_dict, or a function that makes the stream again: lambda: zip(a, b)"
)
"""What can be rewound instead."""


def reader_for(loader: Any) -> Reader:
    """Chooses the reader of a loader by its kind.

    `why_not` of a loader is the reason why it cannot be rewound, as a sentence without a full stop.
    With None the loader has an exact `state_dict`, and is examined no further.

    Args:
        loader: the user's loader. If only its iterator can have a state, the first epoch begins
            here, which may draw random numbers.
    """
    if isinstance(loader, Reader):
        return loader
    if is_function(loader):
        return FunctionReader(loader)
    if is_replayable(loader):
        return TorchReader(loader)
    has_state = _has_methods(loader, "state_dict", "load_state_dict")
    if hasattr(loader, "why_not"):
        if not loader.why_not:
            return StatefulReader(loader)
        return Reader(loader, obstacle=RewindObstacle(loader.why_not))
    obstacle = _obstacle(loader, has_state=has_state)
    if obstacle is None:
        return StatefulReader(loader)
    if has_state:
        return Reader(loader, obstacle=obstacle)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return IndexReader(loader)
    first = iter(loader)
    for names in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if _has_methods(first, *names):
            return IteratorReader(loader, first, names)
    return Reader(loader, obstacle=obstacle, first=first)


def _has_methods(thing: object, *names: str) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def _obstacle(loader: Any, *, has_state: bool) -> RewindObstacle | None:
    """Why a loader has no `state_dict` that determines what follows, and what to use instead."""
    name = class_name(loader)
    if not has_state:
        article = "an" if name[0].lower() in "aeiou" else "a"
        return RewindObstacle(f"{article} {name} cannot be rewound", _REWINDING)
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher", "DataLoaderAdapter"):
        missing = "the position of this rank"
    elif is_type(loader, "torchdata.nodes", "Loader"):
        missing = "that it reads ahead into the next epoch"
    elif getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        missing = "the order of in_order=False"
    elif _has_shuffle_buffer(loader):
        missing = "its shuffle buffer"
    else:
        unrecorded = [each for each in samplers_of(loader) if _draws_unrecorded(each)]
        if not unrecorded:
            return None
        missing = f"the order of {class_name(unrecorded[0])}"
    return RewindObstacle(f"the state of {name} does not record {missing}", _REWINDING)


def _draws_unrecorded(sampler: Any) -> bool:
    """Whether a sampler draws a new order in every epoch, and does not record it.

    A restored torchdata loader then skips forward through a different order, without a warning.
    """
    draws = generators_of(sampler) and not is_type(sampler, "torchdata", "RandomSampler")
    return not hasattr(sampler, "state_dict") and bool(
        draws or is_type(sampler, "torch.utils.data", *_RANDOM_SAMPLERS)
    )


def _has_shuffle_buffer(loader: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which its state does not have."""
    parts = [getattr(loader, "dataset", loader)]
    for part in parts:  # the list grows by the streams inside its parts
        if is_type(part, "datasets", "BufferShuffledExamplesIterable"):
            return True
        inner = [getattr(part, "_ex_iterable", None), getattr(part, "ex_iterable", None)]
        inner += getattr(part, "ex_iterables", ())
        parts += [each for each in inner if each is not None]
    return False


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
        self._made: Any = None
        self._inner = Reader(None)
        """The reader of what the function has made for this epoch."""
        self._random: RandomStates = {}
        """The random states before the call."""

    def begin(self) -> Iterator[Any]:
        """Calls the function, and begins an epoch of what it returns."""
        self._random = random_states()
        self._made = self.loader()
        self._inner = reader_for(self._made)
        return self._inner.begin()

    def state(self, index: int, *, newest: bool) -> ReaderState | None:
        """The random states of the call, and the state of the stream if it is known."""
        if index == 0:
            return {}
        own = self._inner.state(index, newest=newest) if self._inner.obstacle is None else None
        return {"random": self._random, "own": own}

    def state_between(self) -> ReaderState:
        """Nothing is needed to call the function for another epoch."""
        return {}

    def resume(self, state: ReaderState, index: int) -> tuple[Iterator[Any] | None, int]:
        """Calls the function again. Raises DataError if it returns what it has returned before."""
        if not state:
            return None, 0
        set_random_states(state["random"])
        made = self.loader()
        if made is self._made and isinstance(made, Iterator):
            raise DataError(
                "the function has returned the iterator that it had returned before, which cannot "
                "go back: it has to make a new one at each call"
            )
        self._random, self._made, self._inner = state["random"], made, reader_for(made)
        if state["own"] is None:
            return self._inner.begin(), 0
        return self._inner.resume(state["own"], index)

    def rows(self, index: int) -> list[int] | None:
        """The rows of the stream's batch."""
        return self._inner.rows(index)

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can begin what the function makes."""
        return self._inner.can_read_again(0)


def is_function(loader: Any) -> bool:
    """Whether a loader is a function that makes what is iterated over.

    A class is not such a function, and neither is an object that can be iterated over itself.

    Raises:
        UnusableLoader: the function needs arguments.
    """
    if isinstance(loader, type) or not callable(loader):
        return False
    if hasattr(loader, "__iter__") or hasattr(loader, "__getitem__"):
        return False
    try:
        inspect.signature(loader).bind()
    except TypeError as error:
        name = function_name(loader)
        raise UnusableLoader(
            f"a function that makes the batches takes no arguments, and {name} needs some "
            f"({error}): pass lambda: {name}(...)"
        ) from None
    except ValueError:
        pass  # a function of C has no signature
    return True


def function_name(function: object) -> str:
    """The name of a function for messages; the name of the class for other callable objects."""
    return getattr(function, "__qualname__", type(function).__qualname__)
