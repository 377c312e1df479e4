"""Saves and restores the state of any loader. Classes of torch are recognized by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from healcore.runtime.data.position import state_from_text, state_to_text
from healcore.runtime.data.samplers import is_type, samplers_of

_STATE_DICT = ("state_dict", "load_state_dict")
_GET_STATE = ("get_state", "set_state")
# These samplers draw a new order in every epoch and do not record it. A restored torchdata loader
# then skips forward through a different order, without a warning.
_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
_MAX_BEGINNINGS = 100
"""Number of epochs whose state at the beginning is kept."""


Batch = TypeVar("Batch", covariant=True)


class Indexed(Protocol[Batch]):
    """Batches by index, as in a torch Dataset."""

    def __getitem__(self, index: int, /) -> Batch:
        """The batch at an index; IndexError after the last one."""
        ...


Loader = Iterable[Batch] | Indexed[Batch]


class LoaderAdapter:
    """Saves and restores a loader's state. This base class is for loaders without a state.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        stateless: whether the state is the same at every batch.
        why_not: why the loader cannot be rewound, or None.
    """

    kind = "forward"
    stateless = True

    def __init__(
        self, loader: Any, *, why_not: str | None = None, first: Iterator[Any] | None = None
    ) -> None:
        self._loader = loader
        self.why_not = why_not
        self._first = first

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch; returns its batches."""
        del epoch
        first, self._first = self._first, None
        return iter(self._loader) if first is None else first

    def state_before(self, index: int) -> Any:
        """The state before a batch of this epoch that was read, or None if it is not known."""
        del index
        return None

    def state(self, *, ended: bool) -> Any:
        """The state after the batch that was read last, or after the epoch that has `ended`.

        None at the beginning of an epoch, if no state depends on the epoch.
        """
        del ended

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        """Restores a state, and passes the next `skip` batches if they need not be read.

        Returns:
            The rest of the epoch, or the next epoch, and the number of batches left to pass.
        """
        raise NotImplementedError(self.why_not)


class _StatefulLoader(LoaderAdapter):
    """A loader with `state_dict` and `load_state_dict`: such as torchdata's StatefulDataLoader.

    A loaded state applies to the next `iter`. The samplers' generators are saved too: a
    StatefulDataLoader draws the order and the workers' seeds from one generator, and its state
    records only where the shuffling began. After `load_state_dict` alone the next epoch would have
    a different order.
    """

    kind = "loader"
    stateless = False

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        generators = [getattr(sampler, "generator", None) for sampler in samplers_of(loader)]
        unique = {id(each): each for each in generators if _has_methods(each, _GET_STATE)}
        self._generators: list[Any] = [*unique.values()]

    def state(self, *, ended: bool) -> Any:
        return {
            "loader": self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "ended": ended,
        }

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        self._loader.load_state_dict(state["loader"])
        batches = iter(self._loader)
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        # `iter` has drawn the order of the next epoch before the generators were set.
        return iter(self._loader) if self._generators and state["ended"] else batches, skip


class _StatefulIterator(LoaderAdapter):
    """A loader whose iterator has a state, such as Grain's `get_state` and `set_state`.

    The loader's order may depend on a value that its iterator's state lacks, such as a count of
    epochs. So the state at the beginning of each epoch is kept, for a rewind to it.
    """

    kind = "iterator"
    stateless = False

    def __init__(self, loader: Any, first: Iterator[Any], names: tuple[str, str]) -> None:
        super().__init__(loader, first=first)
        self._current = first
        self._get, self._set = names
        self._beginnings: dict[int, str | None] = {}

    def start(self, epoch: int) -> Iterator[Any]:
        if (text := self._beginnings.get(epoch)) is not None:
            return self.resume(state_from_text(text), 0)[0]
        self._current = super().start(epoch)
        with suppress(Exception):  # `state` raises it again
            self._beginnings[epoch] = state_to_text(self.state(ended=False))
        self._beginnings.pop(epoch - _MAX_BEGINNINGS, None)
        return self._current

    def state(self, *, ended: bool) -> Any:
        return None if ended else getattr(self._current, self._get)()

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        # Reuses the existing iterator: a new iterator could change how the loader shuffles.
        if self._first is not None:
            self._current = super().start(0)
        getattr(self._current, self._set)(state)
        return self._current, skip


class _Indexed(LoaderAdapter):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    _next = 0

    def start(self, epoch: int) -> Iterator[Any]:
        del epoch
        return self.resume(0, 0)[0]

    def state(self, *, ended: bool) -> int:
        del ended
        return 0

    def resume(self, state: int, skip: int) -> tuple[Iterator[Any], int]:
        self._next = state + skip
        return self, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        has_length = hasattr(self._loader, "__len__")
        if has_length and self._next >= len(self._loader):
            raise StopIteration
        self._next += 1
        try:
            return self._loader[self._next - 1]
        except Exception as error:  # an unreadable item counts as read
            if isinstance(error, IndexError) and not has_length:
                raise StopIteration from None
            raise
        except BaseException:  # Ctrl-C: the item was not returned
            self._next -= 1
            raise


class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `EpochReader` raises the error.

    Trainers read in generators, and a generator that raises is finished. This object passes through
    the generator as a batch, so the next batches can still be read.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __repr__(self) -> str:
        return f"UnreadableBatch({self.error!r})"


class TolerantIterator:
    """Iterates over batches; yields an `UnreadableBatch` where reading raises."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            return UnreadableBatch(error)


def adapter_for(loader: Any) -> LoaderAdapter:
    """The adapter for a loader. Begins an epoch if the loader's iterator must be examined.

    A wrapper of a loader can have an attribute `why_not`: the reason why it cannot be rewound, or
    None if its `state_dict` is exact.
    """
    why_not = getattr(loader, "why_not", ...)
    if why_not is None:
        return _StatefulLoader(loader)
    if isinstance(why_not, str):
        return LoaderAdapter(loader, why_not=why_not)
    if is_type(loader, "accelerate.data_loader", "DataLoaderAdapter"):
        return LoaderAdapter(loader, why_not=_accelerate_problem(loader))
    if _has_methods(loader, _STATE_DICT):
        why_not = unrecorded_order(loader)
        return LoaderAdapter(loader, why_not=why_not) if why_not else _StatefulLoader(loader)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return _Indexed(loader)
    first = iter(loader)
    for names in (_GET_STATE, _STATE_DICT):
        if _has_methods(first, names):
            return _StatefulIterator(loader, first, names)
    return LoaderAdapter(loader, why_not=why_no_state(loader), first=first)


def class_name(thing: Any) -> str:
    """Name of an object's class, with its module except for builtins."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


# -- why a loader cannot be rewound ---------------------------------------------------------------


def why_no_state(loader: Any) -> str:
    """Why a loader without a state cannot be rewound, and what to use instead."""
    return (
        f"{class_name(loader)} has no state_dict and load_state_dict (or get_state and set_state): "
        "pass a list, a torch DataLoader of a map-style dataset, torchdata's StatefulDataLoader, a "
        "Grain dataset, or a loader whose iterator has these methods"
    )


def unrecorded_order(loader: Any) -> str | None:
    """Why the state of a loader lacks the order of its batches, or None."""
    if is_type(loader, "torchdata.nodes", "Loader"):
        return f"{class_name(loader)} reads ahead into the next epoch: use StatefulDataLoader"
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        return f"{class_name(loader)} with in_order=False has no fixed order: use in_order=True"
    for sampler in samplers_of(loader):
        unrecorded = is_type(sampler, "torch.utils.data", *_UNRECORDED)
        if unrecorded and not hasattr(sampler, "state_dict"):
            return (
                f"{class_name(loader)} does not record the order of {class_name(sampler)}: use "
                "shuffle=True, or a sampler that records the order in its state_dict"
            )
    return None


def _accelerate_problem(loader: Any) -> str:
    """Why a loader that Accelerate has prepared cannot be rewound."""
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher"):
        return (
            f"{class_name(loader)} reads for all ranks on one rank: use dispatch_batches=False and "
            "a map-style dataset"
        )
    return (
        f"{class_name(loader)} does not record the position in an IterableDataset: use a map-style "
        "dataset, or pass torchdata's StatefulDataLoader to the Healer without preparing it"
    )


def _has_methods(thing: Any, names: tuple[str, str]) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)
