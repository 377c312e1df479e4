"""Positions in the data, and how the state of any loader is saved and restored.

A position is the loader's state at its last capture, and the number of batches since, as Python
values that any checkpoint can hold. The loader's own state is text of `runtime.store.values`,
because a JAX run may read from a torch loader, and a store of JAX cannot save torch tensors.
Classes of torch are recognized by name.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.events.schema import rows_text
from healcore.runtime.store import values

POSITION_VERSION = 2
"""Version of the format of positions."""
_STATE_PATH = ("the loader's state",)


class DataError(HealcoreError, RuntimeError):
    """The data cursor cannot do what was requested. Exceptions of the loader stay unchanged."""


class UnusableLoader(DataError, TypeError):
    """The object is no loader, or has fewer epochs than requested."""


@dataclass(eq=False, repr=False)
class EmptyLoader(DataError):
    """The loader gave no batch in a whole epoch."""

    epoch: int
    loader: str

    def _message(self) -> str:
        hint = "is the dataset empty, or smaller than one batch with drop_last=True?"
        if self.epoch > 0:
            hint = (
                "it can be iterated over only once: pass something that starts again with every "
                "iter(), or epochs=1"
            )
        return f"{self.loader} gave no batch in epoch {self.epoch}: {hint}"


class _Place(NamedTuple):
    epoch: int
    index: int
    """Number of the batch in its epoch; skipped batches count too."""


class BatchId(_Place):
    """Identifies a batch of the whole run by numbers from 0. A rewind does not change it."""

    rows: list[int] | None = None
    """The first rows of the dataset in a batch that was read, at most
    `healcore.events.schema.MAX_ROWS`, or None if unknown. They are no part of the id."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """How pydantic reads an id in a checkpoint: as its two numbers.

        Pydantic before 2.8 takes `rows` for a third field.
        """
        from pydantic_core.core_schema import no_info_after_validator_function

        del source
        return no_info_after_validator_function(lambda place: cls(*place), handler(_Place))

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" (rows {rows_text(self.rows)})"
        return f"batch {self.index} of epoch {self.epoch}{rows}"


class Position(NamedTuple):
    """A decoded position."""

    kind: str  # `LoaderAdapter.kind` of the adapter that took the state
    batch: BatchId  # the next batch
    state: Any  # the adapter's, or None if the epoch has not begun or the adapter has no state
    sampler_epoch: int | None  # argument of `set_epoch` for this epoch, or None if unknown
    behind: int  # number of batches between the state and the next batch, to pass again


def encode_position(
    kind: str, batch: BatchId, state: Any, sampler_epoch: int | None, division: Any
) -> dict[str, Any]:
    """A position as dictionaries, lists, numbers and strings; see `Position`.

    The text of the state is also a copy: loaders return live objects.
    """
    text = None if state is None else values.dumps(state, _STATE_PATH)
    names = ("version", "kind", "epoch", "index", "state", "told_epoch", "behind", "division")
    parts = (POSITION_VERSION, kind, *batch, text, sampler_epoch, 0, division)
    return dict(zip(names, parts, strict=True))


def position_of_other_ranks(value: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Converts a position of a run with `ranks` ranks for a run with another number of ranks.

    The loader's state belongs to one rank's part of the data and is not used. The epoch begins
    again, and the batches before the position are read and dropped.
    """
    return {**value, "state": None, "behind": value["index"], "ranks": ranks}


def check_division(value: Mapping[str, Any], division: list[Any] | None, loader: str) -> None:
    """Raises DataError if a position of another number of ranks would select different data."""
    ranks, before = value.get("ranks"), value.get("division")
    if ranks is None or (before is not None and before == division):
        return
    if before is None:
        problem = "how the loader divided the data among the ranks is unknown"
    else:
        now = "an unknown number" if division is None else f"{division[1]} {division[0]}"
        problem = f"the loader had {before[1]} {before[0]}, and {loader} has {now}"
    raise DataError(
        f"the position in the data was saved by {ranks} ranks, and with this number of ranks batch "
        f"{value['index']} has other rows: {problem}. Start the run with {ranks} ranks, or keep "
        "the global batch: with a DistributedSampler keep (batch size) x (number of ranks), or "
        "pass a list of global batches and let every rank take its rows"
    )


def decode_position(value: Any) -> Position:
    """Decodes a position of a checkpoint or a user; DataError if it cannot be read."""
    if not isinstance(value, Mapping) or value.get("version") != POSITION_VERSION:
        raise DataError(
            f"a position is a result of Cursor.position() of version {POSITION_VERSION}, "
            f"not {value!r:.80}"
        )
    try:
        behind = int(value["behind"])
        batch = BatchId(value["epoch"], value["index"])
        if not all(type(part) is int and part >= 0 for part in batch):
            raise DataError(f"epoch and index of a batch are whole numbers >= 0, not {(*batch,)}")
        if not 0 <= behind <= batch.index:
            raise DataError(f"batch {batch.index} has no {behind} batches before it in its epoch")
        number = None if value["told_epoch"] is None else int(value["told_epoch"])
        state = None if value["state"] is None else values.loads(value["state"], _STATE_PATH)
        return Position(str(value["kind"]), batch, state, number, behind)
    except DataError:
        raise
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(f"the position cannot be read: {type(error).__name__}: {error}") from error


# -- the state of a loader ------------------------------------------------------------------------

_STATE_DICT = ("state_dict", "load_state_dict")
_GET_STATE = ("get_state", "set_state")
# These samplers draw a new order in every epoch and do not record it. A restored torchdata loader
# then skips forward through a different order, without a warning.
_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")

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
        why_not: why the loader has no state and cannot be rewound, or None.
        draws: whether reading a batch may draw from the global random generators of this process.
        begins_again: whether `start_again` begins an epoch that has begun already.
        reads_again: whether this rank reads a batch again while other ranks wait for it, so that
            nothing may be exchanged with them.
    """

    kind = "forward"
    draws = False
    begins_again = False
    reads_again = False

    def __init__(
        self, loader: Any, *, why_not: str | None = None, first: Iterator[Any] | None = None
    ) -> None:
        self._loader = loader
        self.why_not = why_not
        self._first = first

    def start(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch; returns its batches."""
        first, self._first = self._first, None
        return iter(self._loader) if first is None else first

    def start_again(self, epoch: int) -> Iterator[Any]:
        """Begins an epoch from its first batch that `start` has begun, if `begins_again`."""
        return self.start(epoch)

    def state_before(self, index: int) -> Any:
        """The state before a batch of this epoch that was read, or None if it is not known."""
        return None

    def state(self, *, ended: bool) -> Any:
        """The state after the batch that was read last, or after the epoch that has `ended`.

        None at the beginning of an epoch, if no state depends on the epoch.
        """

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        """Restores a state, and passes the next `skip` batches if they need not be read.

        Returns the rest of the epoch, or the next epoch, and the number of batches left to pass.
        """
        raise NotImplementedError(self.why_not)

    def rows(self) -> list[int] | None:
        """The dataset's indices of the batch that was read last, or None if they are unknown."""
        return None

    def can_read_again(self, index: int) -> bool:
        """Whether a rank alone can read this batch of the epoch again, if it can be rewound."""
        return True

    def stay(self, batches: Iterator[Any]) -> bool:
        """Whether the next `next` of an epoch's batches reads the batch that has just raised.

        Only for loaders that cannot be rewound. Most iterators have passed that batch, or have
        ended, and what a wrapper around another iterator does is unknown. An iterator of the
        program's own class that holds no other iterator is asked again: a stream that connects
        again continues where it was.
        """
        return connects_again(batches)


def connects_again(batches: Iterator[Any]) -> bool:
    """Whether an iterator is of a class in Python that holds no other iterator.

    Open files and responses of a server are iterators too, and belong to the connection.
    """
    if not inspect.isfunction(getattr(type(batches), "__next__", None)):
        return False  # a generator, a `zip`, a `map`
    held = getattr(batches, "__dict__", {}).values()
    return not any(
        isinstance(each, Iterator) and each is not batches and not isinstance(each, io.IOBase)
        for each in held
    )


class _StatefulLoader(LoaderAdapter):
    """A loader with `state_dict` and `load_state_dict`: such as torchdata's StatefulDataLoader.

    A loaded state applies to the next `iter`. The samplers' generators are saved too: a
    StatefulDataLoader draws the order and the workers' seeds from one generator, and its state
    records only where the shuffling began. After `load_state_dict` alone the next epoch would have
    a different order.
    """

    kind = "loader"
    begins_again = True

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._generators = generators_of(samplers_of(loader))
        self._at_start: list[Any] = []  # states of the generators before the epoch has begun
        self.draws = not getattr(loader, "num_workers", 0)

    def start(self, epoch: int) -> Iterator[Any]:
        self._at_start = [generator.get_state() for generator in self._generators]
        return super().start(epoch)

    def start_again(self, epoch: int) -> Iterator[Any]:
        for generator, state in zip(self._generators, self._at_start, strict=True):
            generator.set_state(state)
        return self.start(epoch)

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
    draws = True
    begins_again = True

    def __init__(self, loader: Any, first: Iterator[Any], names: tuple[str, str]) -> None:
        super().__init__(loader, first=first)
        self._current = first
        self._get, self._set = names
        self._beginnings: dict[int, Any] = {}

    def start(self, epoch: int) -> Iterator[Any]:
        if (state := self._beginnings.get(epoch)) is not None:
            return self.resume(copy.deepcopy(state), 0)[0]
        self._current = super().start(epoch)
        with suppress(Exception):  # `state` raises it again
            self._beginnings[epoch] = copy.deepcopy(self.state(ended=False))
        return self._current

    def state(self, *, ended: bool) -> Any:
        return None if ended else getattr(self._current, self._get)()

    def resume(self, state: Any, skip: int) -> tuple[Iterator[Any], int]:
        # Reuses the existing iterator: a new iterator could change how the loader shuffles.
        if self._first is not None:
            self._current = super().start(0)
        getattr(self._current, self._set)(state)
        return self._current, skip


class _IndexedLoader(LoaderAdapter, Iterator[Any]):
    """A sequence, or an object with `__getitem__` only, which is read by index."""

    kind = "sequence"
    begins_again = True
    _next = 0

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.draws = not isinstance(loader, list | tuple | range)

    def start(self, epoch: int) -> Iterator[Any]:
        self._next = 0
        return self

    def state(self, *, ended: bool) -> int | None:
        return None if ended else self._next

    def resume(self, state: int, skip: int) -> tuple[Iterator[Any], int]:
        self._next = state + skip
        return self, 0

    def __next__(self) -> Any:
        at = self._next
        has_length = hasattr(self._loader, "__len__")
        if has_length and at >= len(self._loader):
            raise StopIteration
        try:
            batch = self._loader[at]
        except Exception as error:  # an unreadable item counts as read, an interrupted one does not
            if isinstance(error, IndexError) and not has_length:
                raise StopIteration from None
            self._next = at + 1
            raise
        self._next = at + 1
        return batch


class _Replayed(Iterator[Any]):
    """The samples of a dataset, of which those of the current batch can be read again.

    If a sample of a batch raises, torch drops the samples of the batch before it.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples
        self.failure: Exception | None = None  # of the last sample
        self._of_batch: list[Any] = []
        self._again: list[Any] = []  # samples to yield again, the last one first

    def __next__(self) -> Any:
        if self._again:
            sample = self._again.pop()
        else:
            failure, self.failure = self.failure, None
            try:
                sample = next(self.samples)
            except StopIteration:
                if failure is None:
                    raise
                self.failure = failure  # the stream has ended with it, and not with its data
                raise failure from None
            except Exception as error:
                self.failure = error
                raise
        self._of_batch.append(sample)
        return sample

    def end_batch(self) -> None:
        """Forgets the samples of a batch that was read."""
        self._of_batch.clear()

    def begin_batch_again(self) -> None:
        """Yields the samples of a batch that was not read once more."""
        self._again = [*self._again, *reversed(self._of_batch)]
        self._of_batch.clear()


class _TorchStream(LoaderAdapter, Iterator[Any]):
    """A torch DataLoader that cannot be rewound, such as one of an IterableDataset.

    Without workers, a dataset that connects again after an exception loses no sample.
    """

    _batches: Iterator[Any]
    _samples: _Replayed | None = None

    def start(self, epoch: int) -> Iterator[Any]:
        self._batches, self._samples = super().start(epoch), None
        fetcher = getattr(self._batches, "_dataset_fetcher", None)  # in a worker, if there are any
        samples = getattr(fetcher, "dataset_iter", None)
        if fetcher is not None and samples is not None and connects_again(samples):
            self._samples = fetcher.dataset_iter = _Replayed(samples)
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if self._samples is not None:
            self._samples.end_batch()
        return batch

    def stay(self, batches: Iterator[Any]) -> bool:
        if self._samples is None:
            return False
        self._samples.begin_batch_again()
        return True


@dataclass
class UnreadableBatch:
    """Takes the place of a batch whose reading raised, until the `Cursor` raises the error.

    Trainers read in generators, and a generator that raises is finished. This object passes through
    the generator as a batch, so the next batches can still be read.
    """

    error: Exception


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


def adapter_for(loader: Any) -> LoaderAdapter:
    """The adapter for a loader. Begins an epoch if the loader's iterator must be examined.

    A loader can have an attribute `why_not`: the reason why it cannot be rewound. A loader of
    healcore's own, such as `ScanBlocks`, is its own adapter.
    """
    if isinstance(loader, LoaderAdapter):
        return loader
    why_not = loader.why_not if hasattr(loader, "why_not") else _why_no_state(loader)
    if why_not is None:
        return _StatefulLoader(loader)
    if hasattr(loader, "why_not") or _has_methods(loader, _STATE_DICT):
        return LoaderAdapter(loader, why_not=why_not)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return _IndexedLoader(loader)
    first = iter(loader)
    for names in (_GET_STATE, _STATE_DICT):
        if _has_methods(first, names):
            return _StatefulIterator(loader, first, names)
    if is_type(first, "torch.utils.data", "_BaseDataLoaderIter"):
        return _TorchStream(loader, why_not=why_not, first=first)
    return LoaderAdapter(loader, why_not=why_not, first=first)


def _why_no_state(loader: Any) -> str | None:
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
    if not _has_methods(loader, _STATE_DICT):
        article = "an" if name[0].lower() in "aeiou" else "a"
        return (
            f"{article} {name} cannot be rewound: it has no state_dict and load_state_dict (or "
            "get_state and set_state). Pass a list, a torch DataLoader of a map-style dataset, "
            "torchdata's StatefulDataLoader, a Grain dataset, a loader whose iterator has these "
            "methods, or a function that makes the stream again: lambda: zip(a, b)"
        )
    if _has_shuffle_buffer(loader):
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


def _has_shuffle_buffer(loader: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which its state does not have."""
    parts = [getattr(loader, "dataset", loader)]
    for part in parts:
        inner = (getattr(part, name, None) for name in ("_ex_iterable", "ex_iterable"))
        parts += filter(None, (*inner, *getattr(part, "ex_iterables", ())))
    return any(is_type(part, "datasets", "BufferShuffledExamplesIterable") for part in parts)


def class_name(thing: Any) -> str:
    """Name of an object's class, with its module except for builtins."""
    return values.class_name(type(thing)).removeprefix("builtins.")


def is_type(thing: Any, package: str, *names: str) -> bool:
    """Whether a class of one of these names, in a module of the package, is a base of `thing`."""
    return any(
        kind.__name__ in names and kind.__module__.startswith(package)
        for kind in type(thing).__mro__
    )


def _has_methods(thing: Any, names: tuple[str, str]) -> bool:
    return all(callable(getattr(thing, name, None)) for name in names)


# -- samplers of torch loaders --------------------------------------------------------------------


def samplers_of(loader: Any) -> list[Any]:
    """The samplers and batch samplers of a torch loader, including samplers inside samplers."""
    parts = [loader]
    for part in parts:
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not other for other in parts):
                parts.append(inner)
    return parts[1:]


def generators_of(parts: Iterable[Any]) -> list[Any]:
    """The random generators of loaders and samplers, each once."""
    found = [getattr(part, "generator", None) for part in parts]
    return [*{id(each): each for each in found if _has_methods(each, _GET_STATE)}.values()]
