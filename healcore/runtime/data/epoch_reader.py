"""Reads a loader epoch after epoch, and moves it to other positions."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from healcore.runtime.data.loader_adapters import (
    LoaderAdapter,
    UnreadableBatch,
    adapter_for,
    class_name,
    division,
    samplers_of,
)
from healcore.runtime.data.position import (
    BatchId,
    DataError,
    Position,
    state_from_text,
    state_to_text,
)
from healcore.runtime.data.torch_loader import TorchLoader, is_replayable

_MAX_FIRST_STATES = 100


@dataclass(eq=False, repr=False)
class EmptyLoader(DataError):
    """The loader gave no batch in a whole epoch."""

    epoch: int
    loader: str

    def _message(self) -> str:
        if self.epoch == 0:
            hint = "is the dataset empty, or smaller than one batch with drop_last=True?"
        else:
            hint = (
                "it can be iterated over only once: pass something that starts again with every "
                "iter(), or epochs=1"
            )
        return f"{self.loader} gave no batch in epoch {self.epoch}: {hint}"


class EpochReader:
    """A loader and the id of its next batch.

    An epoch begins when its first batch or its state is needed.
    """

    def __init__(self, loader: Any) -> None:
        self.name = class_name(loader)
        self.single_epoch = isinstance(loader, Iterator)
        self.exhausted = False
        """Whether the only epoch of an iterator has ended."""
        self.epoch = 0
        self.index = 0
        self.ended: BatchId | None = None
        """Id after the last batch of the last complete epoch, or None."""
        self.requested_epoch = 0
        """The epoch that the user's loop requested last."""
        self._loader = loader
        self._sampler_epochs = _SamplerEpochs(loader)
        self._batches: Iterator[Any] | None = None
        self._first_states: dict[int, str] = {}  # epoch -> state at its beginning
        self._between = False  # between two epochs
        self._resumed = False  # the epoch was restored from a state

    @functools.cached_property
    def adapter(self) -> LoaderAdapter:
        """Created on first use, because that may begin an epoch."""
        loader = self._loader
        return TorchLoader(loader) if is_replayable(loader) else adapter_for(loader)

    @functools.cached_property
    def division(self) -> list[Any] | None:
        """See `loader_adapters.division`."""
        return division(self._loader)

    @property
    def next_id(self) -> BatchId:
        """The id of the next batch."""
        return BatchId(self.epoch, self.index)

    def begin(self) -> Iterator[Any]:
        """The batches of the epoch; begins the epoch if necessary."""
        if self._batches is None:
            self._sampler_epochs.begin(self.epoch, by_user=self.epoch == self.requested_epoch)
            self._between = self._resumed = False
            if (first := self._first_states.get(self.epoch)) is not None:
                self._batches = self.adapter.resume(state_from_text(first))
            else:
                self._batches = self.adapter.start()
                self._save_first_state()
        return self._batches

    def read(self) -> Any:
        """Reads the next batch; StopIteration after an epoch, EmptyLoader if it had no batch.

        A batch that raises counts as read: torch loaders continue after it.
        """
        which, batches = self.next_id, self.begin()
        try:
            batch = next(batches)
            if isinstance(batch, UnreadableBatch):
                raise batch.error
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            error.add_note(f"healcore: reading batch {which.index} of epoch {which.epoch}")
            self.index += 1
            raise
        self.index += 1
        return batch

    @property
    def length(self) -> int | None:
        """Number of batches in an epoch, or None if the loader has no length."""
        try:
            return len(self._loader)
        except TypeError:
            return None

    def has_batch(self, index: int) -> bool:
        """Whether an epoch has a batch of this index. True if the loader has no length."""
        return self.length is None or index < self.length

    def position(self) -> Position:
        """The current position. Exceptions of the loader propagate."""
        if self.adapter.why_not is not None:
            state = None
        elif self._between:
            # Beginning the next epoch for its state would read ahead.
            state = self.adapter.state_between()
        else:
            self.begin()
            state = self.adapter.state()
        number = self._sampler_epochs.number(self.epoch)
        return Position(self.adapter.kind, self.epoch, self.index, state, number)

    def position_by_index(self, batch: BatchId) -> Position:
        """The position before a batch of a loader whose adapter is `by_index`."""
        number = self._sampler_epochs.number(batch.epoch)
        return Position(self.adapter.kind, *batch, self.adapter.state_at(batch.index), number)

    def restore(self, target: Position) -> None:
        """Moves the loader to the state of a position, `target.behind` batches before it.

        If the loader raises, its position is unknown afterwards.
        """
        self._sampler_epochs.restore(target.epoch, target.sampler_epoch)
        self._batches, self._between = None, True
        state, behind = target.state, target.behind
        if behind and state is not None and (later := self.adapter.advanced(state, behind)):
            state, behind = later, 0
        if state is not None:
            self._batches = self.adapter.resume(state)
            self._resumed, self._between = True, False
        self.exhausted = False
        self.epoch, self.index = target.epoch, target.index - behind

    def jump(self, target: Position) -> None:
        """Moves to the beginning of the position's epoch without restoring a state."""
        self._sampler_epochs.restore(target.epoch, target.sampler_epoch)
        self._batches, self._between = None, False
        self.epoch, self.index = target.epoch, 0

    def abandon(self) -> None:
        """Drops the rest of the epoch; the next batch belongs to the next epoch."""
        if self.index > 0 and not self.single_epoch:
            self.epoch, self.index = self.epoch + 1, 0
            # Not between two epochs: the loader's own state still belongs to this epoch.
            self._batches, self._between = None, False

    def disable_rewind(self, error: Exception) -> None:
        """Prevents rewinds from now on, because the loader's state could not be taken."""
        why = f"the state of {self.name} cannot be taken: {type(error).__name__}: {error}"
        self.adapter = LoaderAdapter(self._loader, why_not=why)
        self._first_states.clear()

    def _save_first_state(self) -> None:
        """Keeps the state at the beginning of an epoch, for a rewind to it.

        The loader's order may depend on a value that its iterator's state lacks, such as a count of
        epochs.
        """
        if self.adapter.complete:
            return
        try:
            self._first_states[self.epoch] = state_to_text(self.adapter.state())
        except Exception as error:  # the loader's code may raise anything
            self.disable_rewind(error)
        while len(self._first_states) > _MAX_FIRST_STATES:
            del self._first_states[min(self._first_states)]

    def _end(self) -> None:
        if self.index == 0 and not self._resumed:
            raise EmptyLoader(self.epoch, self.name)
        if self.single_epoch:
            self.exhausted = True
            return
        # A state between two epochs may lead to the end of the first: then the epoch begins again.
        if self.index > 0:
            self.ended = self.next_id
            self.epoch += 1
        self.index = 0
        self._batches, self._between = None, True


class _SamplerEpochs:
    """Calls `set_epoch` on samplers and records its arguments: epoch of the cursor -> number.

    DistributedSampler and others need `set_epoch` with the next number for a new order, and with
    the earlier number after a rewind. A user's loop over epochs usually calls `set_epoch`; the
    number is then read, not overwritten.
    """

    def __init__(self, loader: Any) -> None:
        owners = (loader, *samplers_of(loader), getattr(loader, "dataset", None))
        settable = [owner for owner in owners if callable(getattr(owner, "set_epoch", None))]
        self._samplers: list[Any] = list({id(sampler): sampler for sampler in settable}.values())
        self._numbers: dict[int, int] = {}

    def begin(self, epoch: int, *, by_user: bool) -> None:
        """Sets the epoch's number, or reads it if the user's loop began the epoch (`by_user`)."""
        if not self._samplers:
            return
        if epoch in self._numbers:
            self._set(self._numbers[epoch])
            return
        if by_user:
            number = self._read()
        else:
            number = self._numbers.get(epoch - 1, epoch - 1) + 1
            self._set(number)
        self._numbers[epoch] = epoch if number is None else number

    def number(self, epoch: int) -> int | None:
        """The number of an epoch that has begun or is next, or None if unknown."""
        before = self._numbers.get(epoch - 1)
        return self._numbers.get(epoch, None if before is None else before + 1)

    def restore(self, epoch: int, number: int | None) -> None:
        if self._samplers and number is not None:
            self._numbers[epoch] = number
            self._set(number)

    def _set(self, number: int) -> None:
        for sampler in self._samplers:
            sampler.set_epoch(number)

    def _read(self) -> int | None:
        for sampler in self._samplers:
            number = getattr(sampler, "epoch", None)
            if type(number) is int:
                return number
        return None
