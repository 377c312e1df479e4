"""The epoch of a loader that is being read: how it begins, how it ends, and its state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TypeVar

from healcore.runtime.data.adapter_choice import adapter_for
from healcore.runtime.data.function_loader import FunctionLoader, function_name, is_function
from healcore.runtime.data.loader_adapter import BatchIterator, LoaderAdapter
from healcore.runtime.data.loader_parts import class_name
from healcore.runtime.data.loader_protocols import AnyLoader, LoaderState
from healcore.runtime.data.other_ranks import check_division, division
from healcore.runtime.data.positions import (
    BatchId,
    Position,
    SavedPosition,
    UnusableLoader,
    decode_position,
    encode_position,
)
from healcore.runtime.data.random_states import (
    RandomStates,
    random_states,
    set_random_states,
)
from healcore.runtime.data.read_retries import ReadRetries
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.data.sampler_epochs import SamplerEpochs
from healcore.runtime.data.torch_loader import TorchLoader, is_replayable

T = TypeVar("T")


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

    At the first use of the loader, and after a `break`. After a `break` the loader's own state
    still belongs to the epoch that was left, and a restore would continue this epoch.
    """
    READING = "reading"
    """The epoch was begun. An epoch that ends now without a batch is an error, `EmptyLoader`."""
    RESTORED = "restored"
    """The epoch was restored from a state. It may have no batch left, which is not an error."""
    BETWEEN = "between two epochs"
    """An epoch has ended, and the next one has not begun.

    A state that is taken now is the state after the end. The next epoch does not begin only to take
    its state: it may draw an order from the random generators, before the program's code after the
    epoch has drawn its own numbers.
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
            begins during this is an epoch that has begun before, and that other ranks do not begin
            again.

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

        Made on first use. To find out what an iterator can do, the iterator may have to be made,
        and that begins an epoch and draws its order. A failure in the network is retried.
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
        self.phase = EpochPhase.NOT_BEGUN  # stays if the loader raises
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
        self.forget_state(RewindObstacle(f"{self.name} is closed"))

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

    def forget_state(self, obstacle: RewindObstacle) -> None:
        """Treats the loader as a loader that cannot be rewound from now on.

        Called where the loader's state cannot be trusted any more. A later rollback then leaves the
        loader where it is.

        Args:
            obstacle: the reason, for `Cursor.rewind_obstacle`.
        """
        self.adapter = LoaderAdapter(self.loader, obstacle=obstacle)

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
