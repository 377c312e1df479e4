"""The epoch of a loader that is being read: how it begins, how it ends, and its state.

`SamplerEpochs` calls `set_epoch` of the samplers when an epoch begins. `division` says how the data
is divided among the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from healcore.runtime.data.function_loader import FunctionLoader, function_name, is_function
from healcore.runtime.data.loader_adapters import BatchIterator, LoaderAdapter, adapter_for
from healcore.runtime.data.loader_protocols import (
    AnyLoader,
    LoaderState,
    class_name,
    is_type,
    samplers_of,
)
from healcore.runtime.data.positions import (
    GLOBAL_ROWS,
    BatchId,
    Division,
    Position,
    SavedPosition,
    UnusableLoader,
    check_division,
    decode_position,
    encode_position,
)
from healcore.runtime.data.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)
from healcore.runtime.data.torch_loader import TorchLoader, base_of, is_replayable, without_fabric


def division(loader: AnyLoader) -> Division | None:
    """What has to stay equal when a run continues with another number of ranks.

    If it is equal, batch i of every epoch has the same rows as before, over all ranks together. The
    unit is batches if every rank reads the same ones (a list, a loader in order), else rows of a
    global batch.

    Args:
        loader: the user's loader.

    Returns:
        [unit, number], or None if it is unknown.
    """
    if isinstance(loader, Sequence):
        return ["batches", len(loader)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(batch_sampler, "batch_size", None)
    for sampler in samplers_of(loader):
        replicas = getattr(sampler, "num_replicas", None)
        distributed = sampler is not batch_sampler and hasattr(sampler, "set_epoch")
        if distributed and type(rows) is int and type(replicas) is int:
            return [GLOBAL_ROWS, rows * replicas]
        if is_type(sampler, "torch.utils.data", "SequentialSampler") and hasattr(loader, "__len__"):
            return ["batches", len(loader)]
    return None


class SamplerEpochs:
    """Calls `set_epoch` on samplers and records its arguments: epoch of the cursor -> number.

    DistributedSampler and others need `set_epoch` with the next number for a new order, and with
    the earlier number after a rewind. A user's loop over epochs usually calls `set_epoch`; the
    number is then read, not overwritten.

    Args:
        loader: the user's loader. `set_epoch` is called on it, its samplers and its dataset, where
            they have this method.
    """

    def __init__(self, loader: AnyLoader) -> None:
        self._owners: list[Any] = []
        """The objects with `set_epoch`."""
        for each in (loader, *samplers_of(loader), getattr(loader, "dataset", None)):
            if callable(getattr(each, "set_epoch", None)):
                self._owners.append(each)
        self._fabric: Any = None
        """A loader of Fabric, which counts its iterations as epochs, or None."""
        if is_replayable(loader) and without_fabric(loader) is not loader:
            self._fabric = loader
        self._numbers: dict[int, int] = {}

    @property
    def sampler_name(self) -> str:
        """Type of an object with `set_epoch`, or an empty string for a loader without one."""
        if not self._owners:
            return ""
        return type(self._owners[-1]).__name__

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """Sets the epoch's number, or reads it if the user's loop began the epoch.

        Args:
            epoch: number of the epoch for the cursor, from 0.
            by_user: whether the user's loop has requested this epoch.
        """
        if epoch not in self._numbers and by_user:
            self._numbers[epoch] = self._read(default=epoch)
            if self._fabric is None:
                return
        number = self.number(epoch)
        if number is None:
            number = epoch
        self.restore(epoch, number)

    def number(self, epoch: int) -> int | None:
        """The argument of `set_epoch` for an epoch.

        Args:
            epoch: number of the epoch for the cursor, from 0.

        Returns:
            The number, of an epoch that has begun or is next. None if it is unknown.
        """
        if epoch in self._numbers:
            return self._numbers[epoch]
        before = self._numbers.get(epoch - 1)
        if before is None:
            return None
        return before + 1

    def restore(self, epoch: int, number: int | None) -> None:
        """Sets the number of an epoch of a saved position.

        Args:
            epoch: number of the epoch for the cursor, from 0.
            number: argument for `set_epoch`, or None to set nothing.
        """
        if number is None:
            return
        self._numbers[epoch] = number
        for owner in self._owners:
            owner.set_epoch(number)
        if self._fabric is not None:
            self._fabric._num_iter_calls = number + 1

    def _read(self, default: int) -> int:
        """The number that the user's loop has set, or the default if no object tells it."""
        if self._fabric is not None:
            return self._fabric._num_iter_calls
        for owner in self._owners:
            name = "epoch"
            if base_of(owner) is not owner:
                name = "iteration"  # Accelerate's own count
            number = getattr(owner, name, None)
            if type(number) is int:
                return number
        return default


T = TypeVar("T")


class ReadRetries(Protocol):
    """The attempts to read a batch after failures in the network.

    `healcore.runtime.faults.retry.Retries` implements it with the policy's `[retry]`. The data
    layer knows only these two methods.
    """

    def wait_after(self, error: BaseException) -> bool:
        """Waits after a failed attempt.

        Args:
            error: the exception of the attempt.

        Returns:
            Whether to read again. False for an exception that is not a failure in the network, and
            after the last attempt.
        """
        ...

    def report_success(self) -> None:
        """Reports a success. After failures, the run's log gets a line."""
        ...


class EpochPhase(Enum):
    """How far the reading of a loader is within its epochs.

    The loader's iterator exists in the phases READING, RESTORED and EXHAUSTED only.

        event                                  from               to
        -------------------------------------  -----------------  --------------
        `LoaderEpoch.begin`                    NOT_BEGUN, BETWEEN  READING
        `end`, a loader that can begin again   READING, RESTORED   BETWEEN
        `end`, an iterator                     READING, RESTORED   EXHAUSTED
        `drop`, such as after a `break`        any                 NOT_BEGUN
        `restore`, a position with a state     any                 RESTORED
        `restore`, a position without a state  any                 BETWEEN
    """

    NOT_BEGUN = "not begun"
    """The next epoch has to begin before its state can be taken.

    At the first use of the loader, and after a `break`: the loader's own state still belongs to the
    epoch that was left, and would restore its rest.
    """
    READING = "reading"
    """The epoch was begun. An epoch that ends now without a batch is an error, `EmptyLoader`."""
    RESTORED = "restored"
    """The epoch was restored from a state. It may have no batch left, which is not an error."""
    BETWEEN = "between two epochs"
    """An epoch has ended, and the next one has not begun.

    The state of a loader is its state after the end. To begin the next epoch for its state would
    read ahead: it may draw an order from the random generators, before the code after the epoch.
    """
    EXHAUSTED = "exhausted"
    """The only epoch of an iterator has ended."""


class LoaderEpoch:
    """Begins the epochs of one loader and holds the iterator of the current one.

    It counts no batches; `BatchStream` does, and passes the numbers of epochs. Beginning an epoch
    may draw random numbers (torch loaders do) and may read from the network.

    Args:
        loader: something to iterate over, or a function that makes one.
        retries: the attempts to begin an epoch after failures in the network, or None for one.

    Attributes:
        loader: the user's loader.
        name: the loader's class or function, for messages.
        phase: see `EpochPhase`.
        batches: the rest of the epoch, or None if it has not begun.
        sampler_epochs: the numbers that `set_epoch` of the loader and its samplers gets.
        begin_states: random states before this epoch has begun. Empty without `retries`.
        reads_again: whether a batch is read once more after a failure in the network. An epoch that
            begins meanwhile has begun before, and other ranks do not begin it again.

    Raises:
        UnusableLoader: the loader cannot be iterated over.
    """

    def __init__(self, loader: AnyLoader, retries: ReadRetries | None) -> None:
        self._is_function = is_function(loader)
        if not self._is_function:
            _check_iterable(loader)
        self.loader = loader
        if self._is_function:
            self.name = f"function {function_name(loader)}"
        else:
            self.name = class_name(loader)
        self.phase = EpochPhase.NOT_BEGUN
        self.batches: BatchIterator | None = None
        self.sampler_epochs = SamplerEpochs(loader)
        self.begin_states: RandomStates = {}
        self.reads_again = False
        self._retries = retries

    @functools.cached_property
    def adapter(self) -> LoaderAdapter:
        """Saves and restores the loader's state.

        Made on first use, and not with this object: to find out what an iterator can do, it may
        have to be made, and that begins an epoch and draws its order. A failure in the network is
        retried.
        """
        loader = self.loader
        if self._is_function:
            return FunctionLoader(loader)
        if is_replayable(loader):
            return TorchLoader(loader)
        return self._call_patiently(lambda: adapter_for(loader))

    @property
    def is_between_epochs(self) -> bool:
        """Whether an epoch has ended, and the next one has not begun."""
        return self.phase is EpochPhase.BETWEEN

    @property
    def may_be_empty(self) -> bool:
        """Whether the epoch may end without a batch: it was restored from a state at its end."""
        return self.phase is EpochPhase.RESTORED

    # -- begin and end --------------------------------------------------------------------------

    def begin(self, epoch: int, *, by_user: bool) -> BatchIterator:
        """Begins an epoch, whose iterator does not exist yet.

        Args:
            epoch: number of the epoch, from 0.
            by_user: whether the user's loop has begun the epoch, and has called `set_epoch`.

        Returns:
            The batches of the epoch.
        """
        self.sampler_epochs.begin(epoch, by_user=by_user)
        self.phase = EpochPhase.NOT_BEGUN  # also if the loader raises
        start = self.adapter.start
        if self.reads_again:
            start = self.adapter.start_again
        if self._retries is not None:
            self.begin_states = random_states()
        self.batches = self._call_patiently(lambda: start(epoch))
        self.phase = EpochPhase.READING
        return self.batches

    def end(self) -> None:
        """Ends the epoch after its last batch.

        The iterator is released, so that workers of the epoch end. An iterator that is the loader
        itself is kept: it cannot begin another epoch. The phase says which of the two it is.
        """
        if isinstance(self.loader, Iterator):
            self.phase = EpochPhase.EXHAUSTED
        else:
            self.batches, self.phase = None, EpochPhase.BETWEEN

    def drop(self) -> None:
        """Drops the rest of the epoch. The next batch begins an epoch.

        The state of the loader still belongs to the epoch that was dropped, and not to the end of
        an epoch as after `end`. It is not taken before the next epoch has begun.
        """
        self.batches, self.phase = None, EpochPhase.NOT_BEGUN

    def close(self) -> None:
        """Releases the loader's iterator with its workers.

        Otherwise they would live as long as the Healer, which a program may keep for its report.
        The loader cannot be rewound afterwards.
        """
        self.batches = None
        self.forget_state(f"{self.name} is closed")

    def _call_patiently(self, begin: Callable[[], T]) -> T:
        """Calls a function that begins to read, and calls it again after failures in the network.

        Each call begins with the random states of the first, because it may draw an order.
        """
        if self._retries is None or self.reads_again:
            return begin()
        states = random_states()
        while True:
            try:
                begun = begin()
            except Exception as error:
                if not self._retries.wait_after(error):
                    raise
                set_random_states(states)
            else:
                self._retries.report_success()
                return begun

    # -- the state ------------------------------------------------------------------------------

    def state(self) -> LoaderState | None:
        """The state of the loader after the batch that was read last, see `LoaderAdapter.state`.

        Returns:
            A value that `encode` puts into a position. None if the adapter needs no state here, as
            at the beginning of some epochs.
        """
        return self.adapter.state(ended=self.is_between_epochs)

    def forget_state(self, why_not: str) -> None:
        """Makes the loader a loader that cannot be rewound from now on.

        Called where the loader's state cannot be trusted any more. A rollback then keeps the loader
        where it is.

        Args:
            why_not: the reason, for `Cursor.why_not`.
        """
        self.adapter = LoaderAdapter(self.loader, why_not=why_not)

    def restore(self, target: Position) -> int:
        """Moves the loader to the state of a position.

        If the loader raises, its position is unknown.

        Returns:
            Number of batches after the state, which the caller reads and drops.
        """
        self.sampler_epochs.restore(target.batch.epoch, target.sampler_epoch)
        self.batches, self.phase = None, EpochPhase.BETWEEN
        if target.state is None:
            return target.behind
        self.batches, behind = self.adapter.resume(target.state, target.behind)
        self.phase = EpochPhase.RESTORED
        return behind

    def encode(self, batch: BatchId, state: LoaderState | None) -> SavedPosition:
        """A position of this loader for a checkpoint.

        Args:
            batch: the next batch.
            state: the state before this batch, or None.
        """
        number = self.sampler_epochs.number(batch.epoch)
        return encode_position(self.adapter.kind, batch, state, number, division(self.loader))

    def decode(self, position: object) -> Position:
        """Decodes a position for this loader. Changes nothing.

        Args:
            position: a position from a checkpoint.

        Returns:
            The position, for `restore`.

        Raises:
            DataError: it is not a position, or its batch has other rows for this number of ranks.
        """
        target = decode_position(position)
        check_division(position, division(self.loader), self.name)  # type: ignore[arg-type]
        return target


def _check_iterable(loader: AnyLoader) -> None:
    """Raises UnusableLoader for an object that is nothing to iterate over."""
    is_iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not is_iterable or isinstance(loader, type):
        raise UnusableLoader(
            f"a loader is something to iterate over, not {loader!r:.80}: pass a DataLoader, a "
            "dataset of batches, a list, or a function that makes one of these"
        )
