"""Saves and restores the state of any loader. Classes of torch are recognized by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

_END = object()
_STATE_DICT = ("state_dict", "load_state_dict")
_GET_STATE = ("get_state", "set_state")
# These samplers draw a new order in every epoch and do not record it. A restored torchdata loader
# then skips forward through a different order, without a warning.
_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
# torchdata's own sampler records its order in a StatefulDataLoader, but not in its nodes (0.11).
_UNRECORDED_IN_NODES = (*_UNRECORDED, "StatefulDistributedSampler")


class LoaderAdapter:
    """Saves and restores a loader's state. This base class is for loaders without a state.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        complete: whether the state also determines later epochs.
        by_index: whether `state_at` returns the state before any batch of an epoch.
        why_not: why the loader cannot be rewound, or None.
    """

    kind = "forward"
    complete = True
    by_index = True

    def __init__(
        self, loader: Any, *, why_not: str | None = None, first: Iterator[Any] | None = None
    ) -> None:
        self._loader = loader
        self.why_not = why_not
        self._first = first

    def start(self) -> Iterator[Any]:
        """Begins an epoch; returns its batches."""
        first, self._first = self._first, None
        return iterate(self._loader) if first is None else first

    def state(self) -> Any:
        """The state after the batch that was read last."""
        return None

    def state_between(self) -> Any:
        """The state between two epochs, or None if `start` needs no state."""
        return None

    def state_at(self, index: int) -> Any:
        """The state before the batch of an index, or None unless `by_index`."""
        return None

    def advanced(self, state: Any, count: int) -> Any:
        """The state `count` batches later, or None if the batches must be read to reach it."""
        return None

    def resume(self, state: Any) -> Iterator[Any]:
        """Restores a state; returns the rest of its epoch, or the next epoch."""
        raise NotImplementedError(self.why_not)


class _StatefulLoader(LoaderAdapter):
    """A loader with `state_dict` and `load_state_dict`: torchdata's StatefulDataLoader and Loader.

    A loaded state applies to the next `iter`. The samplers' generators are saved too: a
    StatefulDataLoader draws the order and the workers' seeds from one generator, and its state
    records only where the shuffling began. After `load_state_dict` alone the next epoch would have
    a different order.
    """

    kind = "loader"
    by_index = False

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        generators = [getattr(sampler, "generator", None) for sampler in samplers_of(loader)]
        self._generators: list[Any] = [gen for gen in generators if _has_methods(gen, _GET_STATE)]

    def state(self) -> Any:
        return self._state(ended=False)

    def state_between(self) -> Any:
        return self._state(ended=True)

    def resume(self, state: Any) -> Iterator[Any]:
        self._loader.load_state_dict(state["loader"])
        batches = self._start_loaded()
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        # `iter` has drawn the order of the next epoch before the generators were set.
        return self.start() if self._generators and state["ended"] else batches

    def advanced(self, state: Any, count: int) -> Any:
        advanced = getattr(self._loader, "advanced", None)
        if advanced is None or state["ended"]:
            return None
        return {**state, "loader": advanced(state["loader"], count)}

    def _state(self, *, ended: bool) -> dict[str, Any]:
        return {
            "loader": self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "ended": ended,
        }

    def _start_loaded(self) -> Iterator[Any]:
        # torchdata's nodes.Loader reads ahead: after the last batch it would begin the next epoch,
        # and the batches of that epoch would get ids of this epoch.
        if getattr(self._loader, "restart_on_stop_iteration", None) is not True:
            return iter(self._loader)
        self._loader.restart_on_stop_iteration = False
        try:
            return iter(self._loader)
        finally:
            self._loader.restart_on_stop_iteration = True


class _AccelerateLoader(LoaderAdapter):
    """Accelerate's DataLoaderShard around torchdata's StatefulDataLoader.

    It reads one batch ahead, so its state after the last batch of an epoch is the state of the next
    epoch. It seeds its sampler by `iteration`, the epoch, which its state lacks. It draws random
    numbers when it reads the first batch. So `resume` reads a batch of an epoch that had begun,
    before the caller restores the random states.
    """

    kind = "accelerate"
    by_index = False
    _unread: Any = None
    """The state until the first batch after `start` or `resume` is read, then None."""

    def start(self) -> Iterator[Any]:
        return self._begin({**self.state_between(), "begun": True})

    def state(self) -> Any:
        return self._unread or {
            "loader": self._loader.state_dict(),
            "iteration": self._loader.iteration,
            "ended": bool(self._loader.end_of_dataloader),
            "begun": True,
        }

    def state_between(self) -> Any:
        return {"loader": None, "iteration": self._loader.iteration, "ended": False}

    def resume(self, state: Any) -> Iterator[Any]:
        self._loader.iteration = state["iteration"] + state["ended"]
        # Drops the epoch that Accelerate began to take its state. Otherwise it would be the next
        # epoch without drawing random numbers.
        self._loader.load_state_dict({})
        if state["loader"] is not None and not state["ended"]:
            self._loader.load_state_dict(state["loader"])
        return self._begin(state)

    def _begin(self, state: Any) -> Iterator[Any]:
        """Begins the epoch or its rest; reads a batch if the epoch had begun."""
        self._unread = state
        if state["ended"]:
            return iter(())
        batches = iterate(self._loader)
        return self._read(chain([next(batches, _END)], batches) if state.get("begun") else batches)

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._unread = None
            if batch is not _END:
                yield batch


class _StatefulIterator(LoaderAdapter):
    """A loader whose iterator has a state, such as Grain's `get_state` and `set_state`."""

    kind = "iterator"
    complete = False
    by_index = False

    def __init__(self, loader: Any, first: Iterator[Any], names: tuple[str, str]) -> None:
        super().__init__(loader, first=first)
        self._current = first
        self._get, self._set = names

    def start(self) -> Iterator[Any]:
        self._current = super().start()
        return self._current

    def state(self) -> Any:
        return getattr(self._current, self._get)()

    def resume(self, state: Any) -> Iterator[Any]:
        # Reuses the existing iterator: a new iterator could change how the loader shuffles.
        current = self._current if self._first is None else self.start()
        getattr(current, self._set)(state)
        return current


class _IndexedSequence(LoaderAdapter):
    """A sequence that is read by index, such as a list, a tuple or a range."""

    kind = "sequence"
    _next = 0

    def start(self) -> Iterator[Any]:
        return self.resume(0)

    def state(self) -> int:
        return self._next

    def state_at(self, index: int) -> int:
        return index

    def resume(self, state: int) -> Iterator[Any]:
        self._next = state
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._next >= len(self._loader):
            raise StopIteration
        self._next += 1
        try:
            return self._loader[self._next - 1]
        except Exception:  # an unreadable item counts as read
            raise
        except BaseException:  # Ctrl-C: the item was not returned
            self._next -= 1
            raise


class _ByIndex:
    """Iterates over an object that only has `__getitem__`; continues after an item that raises."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._next = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._next += 1
        try:
            return self._loader[self._next - 1]
        except IndexError:
            raise StopIteration from None


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


def iterate(loader: Any) -> Iterator[Any]:
    """The batches of one epoch; continues after a batch that cannot be read."""
    if not hasattr(loader, "__iter__"):
        return _ByIndex(loader)
    if is_type(loader, "accelerate.data_loader", "DataLoaderShard", "SkipDataLoader"):
        return _accelerate_epoch(loader)
    return iter(loader)


def _accelerate_epoch(loader: Any) -> Iterator[Any]:
    """An epoch of Accelerate's loader, which reads another loader in a generator."""
    batches, inner = iter(loader), loader.base_dataloader
    inner.__iter__ = lambda: TolerantIterator(type(inner).__iter__(inner))
    try:
        first = next(batches, _END)  # the generator calls inner.__iter__() here
    finally:
        del inner.__iter__
    if first is not _END:
        yield first
        yield from batches


def adapter_for(loader: Any) -> LoaderAdapter:
    """The adapter for a loader. Begins an epoch if the loader's iterator must be examined.

    A wrapper of a loader can have an attribute `why_not`: the reason why it cannot be rewound.
    """
    if isinstance(why_not := getattr(loader, "why_not", None), str):
        return LoaderAdapter(loader, why_not=why_not)
    if is_type(loader, "accelerate.data_loader", "DataLoaderShard", "DataLoaderDispatcher"):
        why_not = _accelerate_problem(loader)
        return LoaderAdapter(loader, why_not=why_not) if why_not else _AccelerateLoader(loader)
    if _has_methods(loader, _STATE_DICT):
        why_not = _unrecorded_order(loader)
        return LoaderAdapter(loader, why_not=why_not) if why_not else _StatefulLoader(loader)
    if isinstance(loader, Sequence):
        return _IndexedSequence(loader)
    first = iterate(loader)
    for names in (_GET_STATE, _STATE_DICT):
        if _has_methods(first, names):
            return _StatefulIterator(loader, first, names)
    return LoaderAdapter(loader, why_not=why_no_state(loader), first=first)


def samplers_of(loader: Any) -> tuple[Any, Any, Any]:
    """A torch loader's sampler, batch sampler, and the batch sampler's sampler; None if missing."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def division(loader: Any) -> list[Any] | None:
    """[unit, number] that must not change with the number of ranks, or None if unknown.

    If it is equal, batch i has the same rows. It is the number of batches for a list or a loader in
    order, where every rank reads the same batches, else the rows per global batch.
    """
    if isinstance(loader, Sequence):
        return ["batches", len(loader)]
    sampler, batch_sampler, inner = samplers_of(loader)
    rows = getattr(batch_sampler, "batch_size", None)
    for candidate in (sampler, inner):
        replicas = getattr(candidate, "num_replicas", None)
        if type(rows) is int and type(replicas) is int and hasattr(candidate, "set_epoch"):
            return ["rows of a global batch", rows * replicas]
        if is_type(candidate, "torch.utils.data", "SequentialSampler") and hasattr(
            loader, "__len__"
        ):
            return ["batches", len(loader)]
    return None


def class_name(thing: Any) -> str:
    """Name of an object's class, with its module except for builtins."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


# -- why a loader cannot be rewound ---------------------------------------------------------------


def why_no_state(loader: Any) -> str:
    """Why a loader without a state cannot be rewound, and what to use instead."""
    return (
        f"{class_name(loader)} has no state_dict and load_state_dict (or get_state and set_state): "
        "pass a list, torchdata's StatefulDataLoader, a Grain dataset, or a loader whose iterator "
        "has these methods"
    )


def _unrecorded_order(loader: Any) -> str | None:
    """Why a loader's state lacks the order of its batches, or None."""
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        return f"{class_name(loader)} with in_order=False has no fixed order: use in_order=True"
    sampler, _, inner = samplers_of(loader)
    for candidate in (sampler, inner):
        if is_type(candidate, "torch.utils.data", *_UNRECORDED) and not hasattr(
            candidate, "state_dict"
        ):
            return _unrecorded_order_text(candidate, loader, "shuffle=True")
    node = getattr(loader, "root", None) if is_type(loader, "torchdata.nodes", "Loader") else None
    while node is not None:
        sampler = getattr(node, "sampler", None)
        if is_type(sampler, "torch", *_UNRECORDED_IN_NODES):
            return _unrecorded_order_text(sampler, loader, "a DistributedSampler")
        node = getattr(node, "source", None)
    return None


def _accelerate_problem(loader: Any) -> str | None:
    """Why a loader that Accelerate has prepared cannot be rewound, or None."""
    name, options = class_name(loader), ["use_stateful_dataloader=True"]
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher"):
        return f"{name} reads for all ranks on one rank: use dispatch_batches=False"
    sampler = loader.get_sampler()
    shuffles = is_type(sampler, "torch.utils.data", *_UNRECORDED)
    seeded = is_type(sampler, "accelerate.data_loader", "SeedableRandomSampler")
    if getattr(loader, "use_stateful_dataloader", False) and (seeded or not shuffles):
        return None
    if shuffles:
        options.append("use_seedable_sampler=True")
    return (
        f"{name} does not record its position: give the Accelerator "
        f"dataloader_config=DataLoaderConfiguration({', '.join(options)})"
    )


def _unrecorded_order_text(sampler: Any, loader: Any, instead: str) -> str:
    return (
        f"{class_name(loader)} does not record the order of {class_name(sampler)}: use {instead}, "
        "or a sampler that records the order in its state_dict"
    )


def _has_methods(thing: Any, names: tuple[str, str]) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


def is_type(thing: Any, package: str, *names: str) -> bool:
    """Whether a class of one of these names, in a module of the package, is a base of `thing`."""
    return any(
        kind.__name__ in names and kind.__module__.startswith(package)
        for kind in type(thing).__mro__
    )
