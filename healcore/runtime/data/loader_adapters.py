"""How the state of any loader is saved and restored: one adapter for each kind of loader.

`adapter_for` chooses the adapter. The attributes of a loader that it examines are in
`loader_protocols`. Two more adapters are in `torch_loader` and `function_loader`.

    kind of loader                                   adapter            state
    -----------------------------------------------  -----------------  ---------------------------
    `state_dict` and `load_state_dict`               `_StatefulLoader`  of the loader, generators
    an iterator with `get_state` or `state_dict`     `_StatefulIterator`  of the iterator
    a sequence, or `__getitem__` without `__iter__`  `_IndexedLoader`   number of the next batch
    a DataLoader of a stream                         `_TorchStream`     none
    anything else to iterate over                    `LoaderAdapter`    none
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from healcore.runtime.data.loader_parts import (
    class_name,
    connects_again,
    generators_of,
    has_methods,
    has_shuffle_buffer,
    is_type,
    samplers_of,
)
from healcore.runtime.data.loader_protocols import (
    GET_STATE,
    STATE_DICT,
    AnyBatch,
    AnyLoader,
    Indexed,
    LoaderState,
    StatefulLoader,
)

# These samplers draw a new order in every epoch and do not record it. A restored torchdata loader
# then skips forward through a different order, without a warning.
_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")

BatchIterator = Iterator[AnyBatch]
"""The rest of an epoch."""


class LoaderAdapter:
    """Saves and restores a loader's state. This base class is for loaders without a state.

    An adapter begins the epochs of its loader (`start`), says where the reading is (`state`), and
    returns to a state (`resume`). It counts no batches and knows no ids: the `Cursor` does.

    Args:
        loader: the user's loader.
        why_not: why the loader has no state, or None for a loader that has one.
        first: the batches of the first epoch, if it has begun already because the iterator had to
            be examined. Otherwise None.

    Attributes:
        kind: name in positions, because a state fits only loaders of the same kind.
        why_not: why the loader has no state and cannot be rewound, or None.
        draws: whether reading a batch may draw from the global random generators of this process.
            Their states are kept before each read then, so that a repeated read draws the same.
        begins_again: whether `start_again` begins an epoch that has begun already.
        reads_again: whether this rank reads a batch again while other ranks wait for it, so that
            nothing may be exchanged with them. The `Cursor` sets it.
    """

    kind = "forward"
    draws = False
    begins_again = False
    reads_again = False

    def __init__(
        self, loader: AnyLoader, *, why_not: str | None = None, first: BatchIterator | None = None
    ) -> None:
        self._loader = loader
        self.why_not = why_not
        self._first = first

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch.

        Args:
            epoch: number of the epoch, from 0.

        Returns:
            The batches of the epoch.
        """
        first, self._first = self._first, None
        if first is not None:
            return first
        return iter(self._loader)

    def start_again(self, epoch: int) -> BatchIterator:
        """Begins an epoch from its first batch that `start` has begun, if `begins_again`.

        Called after a failure in the network at the first batch. The order of the epoch must be the
        order of the first begin.
        """
        return self.start(epoch)

    def state_before(self, index: int) -> LoaderState | None:
        """The state before a batch of this epoch that was read, or None if it is not known.

        For loaders that record what they have read. A rollback to the first batch of a step then
        needs no state that was taken at that moment.

        Args:
            index: number of the batch in the epoch, below the number of batches read.
        """
        return None

    def state(self, *, ended: bool) -> LoaderState | None:
        """The state after the batch that was read last, or after the epoch that has ended.

        Args:
            ended: whether the epoch has ended, and the next epoch has not begun.

        Returns:
            The state, or None at the beginning of an epoch, if no state depends on the epoch.
        """

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        """Restores a state, and passes the next `skip` batches if they need not be read.

        Args:
            state: result of `state` or `state_before` in this or in an earlier process, not None.
            skip: number of batches to pass after the state.

        Returns:
            The rest of the epoch, or the next epoch; and the number of batches left to pass, which
            the caller reads and drops.

        Raises:
            NotImplementedError: the loader has no state.
        """
        raise NotImplementedError(self.why_not)

    def rows(self) -> list[int] | None:
        """The dataset's indices of the batch that was read last, or None if they are unknown.

        Events name them, so that a user finds the samples of a bad batch. Most loaders do not know
        them.
        """
        return None

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can read this batch of the epoch again, if it can be rewound.

        False where reading exchanges messages with ranks that do not read again.
        """
        return True

    def stay(self, batches: BatchIterator) -> bool:
        """Whether the next `next` of an epoch's batches reads the batch that has just raised.

        It is used only for loaders that cannot be rewound. Most iterators have passed that batch,
        or have ended, and what a wrapper around another iterator does is unknown. An iterator of
        the program's own class that holds no other iterator is asked again: a stream that connects
        again continues where it was.

        Args:
            batches: the rest of the epoch.
        """
        return connects_again(batches)


class _StatefulLoader(LoaderAdapter):
    """A loader with `state_dict` and `load_state_dict`: such as torchdata's StatefulDataLoader.

    A loaded state applies to the next `iter`. The samplers' generators are saved too: a
    StatefulDataLoader draws the order and the workers' seeds from one generator, and its state
    records only where the shuffling began. After `load_state_dict` alone the next epoch would have
    a different order.
    """

    kind = "loader"
    begins_again = True
    _loader: StatefulLoader

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(loader)
        self._generators = generators_of(samplers_of(loader))
        self._at_start: list[Any] = []
        """The states of the generators before the epoch has begun."""
        self.draws = not getattr(loader, "num_workers", 0)

    def start(self, epoch: int) -> BatchIterator:
        self._at_start = [generator.get_state() for generator in self._generators]
        return super().start(epoch)

    def start_again(self, epoch: int) -> BatchIterator:
        for generator, state in zip(self._generators, self._at_start, strict=True):
            generator.set_state(state)
        return self.start(epoch)

    def state(self, *, ended: bool) -> LoaderState:
        return {
            "loader": self._loader.state_dict(),
            "generators": [generator.get_state() for generator in self._generators],
            "ended": ended,
        }

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        loader: Any = self._loader
        loader.load_state_dict(state["loader"])
        batches = iter(loader)
        for generator, saved in zip(self._generators, state["generators"], strict=True):
            generator.set_state(saved)
        if self._generators and state["ended"]:
            # `iter` has drawn the order of the next epoch before the generators were set.
            batches = iter(loader)
        return batches, skip


class _StatefulIterator(LoaderAdapter):
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
        state = self._beginnings.get(epoch)
        if state is not None:
            batches, _ = self.resume(copy.deepcopy(state), 0)
            return batches
        self._current = super().start(epoch)
        with suppress(Exception):  # `state` raises it again
            self._beginnings[epoch] = copy.deepcopy(self.state(ended=False))
        return self._current

    def state(self, *, ended: bool) -> LoaderState | None:
        if ended:
            return None
        get_state = getattr(self._current, self._get)
        return get_state()

    def resume(self, state: LoaderState, skip: int) -> tuple[BatchIterator, int]:
        # Reuses the existing iterator: a new iterator could change how the loader shuffles.
        if self._first is not None:
            self._current = super().start(0)
        set_state = getattr(self._current, self._set)
        set_state(state)
        return self._current, skip


class _IndexedLoader(LoaderAdapter, Iterator[AnyBatch]):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    begins_again = True
    _loader: Indexed[AnyBatch]
    _next = 0

    def __init__(self, loader: AnyLoader) -> None:
        super().__init__(loader)
        self.draws = not isinstance(loader, list | tuple | range)

    def start(self, epoch: int) -> BatchIterator:
        self._next = 0
        return self

    def state(self, *, ended: bool) -> int | None:
        if ended:
            return None
        return self._next

    def resume(self, state: int, skip: int) -> tuple[BatchIterator, int]:
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


class _Replayed(Iterator[Any]):
    """The samples of a dataset. The samples of the current batch can be read again.

    If a sample of a batch raises, torch drops the samples of the batch before it. A stream that
    connects again would continue after the sample that has raised, and the dropped samples would
    never be trained on.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples
        self.failure: Exception | None = None
        """The exception of the last sample, or None if it could be read."""
        self._of_batch: list[Any] = []
        """The samples of the current batch."""
        self._again: list[Any] = []
        """Samples to yield again, the last one first."""

    def __next__(self) -> Any:
        if self._again:
            sample = self._again.pop()
        else:
            sample = self._read()
        self._of_batch.append(sample)
        return sample

    def _read(self) -> Any:
        """Reads a new sample. If the stream has ended with a failure, raises it again."""
        failure, self.failure = self.failure, None
        try:
            return next(self.samples)
        except StopIteration:
            if failure is None:
                raise
            self.failure = failure  # the stream has ended with it, and not with its data
            raise failure from None
        except Exception as error:
            self.failure = error
            raise

    def end_batch(self) -> None:
        """Forgets the samples of a batch that was read."""
        self._of_batch.clear()

    def begin_batch_again(self) -> None:
        """Yields the samples of a batch that was not read once more."""
        self._again = [*self._again, *reversed(self._of_batch)]
        self._of_batch.clear()


class _TorchStream(LoaderAdapter, Iterator[AnyBatch]):
    """A torch DataLoader that cannot be rewound, such as one of an IterableDataset.

    Without workers, a dataset that connects again after an exception loses no sample.
    """

    _batches: BatchIterator
    _samples: _Replayed | None = None
    """The samples of this process, or None if workers read them or the stream cannot connect."""

    def start(self, epoch: int) -> BatchIterator:
        self._batches, self._samples = super().start(epoch), None
        fetcher = getattr(self._batches, "_dataset_fetcher", None)  # in a worker, if there are any
        samples = getattr(fetcher, "dataset_iter", None)
        if fetcher is not None and samples is not None and connects_again(samples):
            self._samples = fetcher.dataset_iter = _Replayed(samples)
        return self

    def __next__(self) -> AnyBatch:
        batch = next(self._batches)
        if self._samples is not None:
            self._samples.end_batch()
        return batch

    def stay(self, batches: BatchIterator) -> bool:
        if self._samples is None:
            return False
        self._samples.begin_batch_again()
        return True


@dataclass
class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `Cursor` raises the error.

    Trainers read in generators, and a generator that raises is finished. This object passes through
    the generator as a batch, so the next batches can still be read. The user's loop never receives
    it.
    """

    error: Exception
    """The exception of the loader."""


def catch_unreadable(batches: BatchIterator) -> BatchIterator:
    """Yields batches, and an `UnreadableBatch` where reading raises.

    Args:
        batches: the batches of an epoch, which can continue after an exception.
    """
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:
            batch = UnreadableBatch(error)
        yield batch


def adapter_for(loader: AnyLoader) -> LoaderAdapter:
    """Chooses the adapter for a loader that is not a DataLoader of a map-style dataset.

    A loader can have an attribute `why_not`, see `ExplainsWhyNot`. A loader of healcore's own, such
    as `ScanBlocks`, is its own adapter.

    Args:
        loader: something to iterate over, or with `__getitem__`. If only its iterator can have a
            state, the first epoch begins here, which may draw random numbers.
    """
    if isinstance(loader, LoaderAdapter):
        return loader
    explains = hasattr(loader, "why_not")
    if explains:
        why_not = loader.why_not
    else:
        why_not = _why_no_state(loader)
    if why_not is None:
        return _StatefulLoader(loader)
    if explains or has_methods(loader, STATE_DICT):
        return LoaderAdapter(loader, why_not=why_not)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return _IndexedLoader(loader)
    first = iter(loader)
    for names in (GET_STATE, STATE_DICT):
        if has_methods(first, names):
            return _StatefulIterator(loader, first, names)
    if is_type(first, "torch.utils.data", "_BaseDataLoaderIter"):
        return _TorchStream(loader, why_not=why_not, first=first)
    return LoaderAdapter(loader, why_not=why_not, first=first)


def _why_no_state(loader: AnyLoader) -> str | None:
    """Why a loader has no exact `state_dict`, and what to use instead, or None if it has one."""
    name = class_name(loader)
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher"):
        return (
            f"{name} reads for all ranks on one rank: use dispatch_batches=False and a map-style "
            "dataset"
        )
    if is_type(loader, "accelerate.data_loader", "DataLoaderAdapter"):
        return (
            f"{name} does not record the position in an IterableDataset: use a map-style dataset, "
            "or pass torchdata's StatefulDataLoader to the Healer without preparing it"
        )
    if not has_methods(loader, STATE_DICT):
        article = "a"
        if name[0].lower() in "aeiou":
            article = "an"
        return (
            f"{article} {name} cannot be rewound: it has no state_dict and load_state_dict (or "
            "get_state and set_state). Pass a list, a torch DataLoader of a map-style dataset, "
            "torchdata's StatefulDataLoader, a Grain dataset, a loader whose iterator has these "
            "methods, or a function that makes the stream again: lambda: zip(a, b)"
        )
    return _why_inexact_state(loader, name)


def _why_inexact_state(loader: AnyLoader, name: str) -> str | None:
    """Why the `state_dict` of a loader does not determine what follows, or None if it does."""
    if has_shuffle_buffer(loader):
        return f"{name} does not record its shuffle buffer: use a map-style dataset, with shuffle"
    if is_type(loader, "torchdata.nodes", "Loader"):
        return f"{name} reads ahead into the next epoch: use StatefulDataLoader"
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        return f"{name} with in_order=False has no fixed order: use in_order=True"
    for sampler in samplers_of(loader):
        unrecorded = is_type(sampler, "torch.utils.data", *_UNRECORDED)
        if unrecorded and not hasattr(sampler, "state_dict"):
            return (
                f"{name} does not record the order of {class_name(sampler)}: use shuffle=True, or "
                "a sampler that records the order in its state_dict"
            )
    return None
