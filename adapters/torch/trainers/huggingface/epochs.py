"""Runs Trainer's epochs so that a rollback can return to an earlier epoch.

`Trainer._run_epoch` counts batches in local variables. Therefore a rollback raises an exception
through it, and `run_epochs` calls it again for the rest of the restored checkpoint's epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from healcore import console
from healcore.runtime.data import BatchId, EmptyLoader
from healcore.runtime.healer import Healer


class EpochChanged(BaseException):
    """Leaves `Trainer._run_epoch`, whose counts are wrong after a rollback or a skipped batch.

    `run_epochs` catches this exception, and calls `_run_epoch` again for the rest of the epoch.
    """


class EpochFeed:
    """Passes the Healer's batches to Trainer, epoch by epoch.

    Attributes:
        epoch: Trainer's current epoch, from 0.
        count: number of batches of this epoch that Trainer has received. Lower than the loader's
            index if a rollback has skipped batches.
        length: number of batches of this epoch, or None if unknown.
        exhausted: whether the data have ended and cannot be read again.
        nothing_to_do: whether an earlier start with the same `max_steps` completed the run. A
            callback may have stopped that run early.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._healer: Healer[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._pending: list[Any] = []
        """Batches that were read and that Trainer has not received."""
        self._window: list[Any] = []
        """Batches that Trainer has received since the last step."""
        self._skipped_at_begin = 0
        """Number of skipped batches when `_run_epoch` was called."""
        self._data_epoch = 0
        """Epoch of the pending batches."""
        self.epoch = 0
        self.count = 0
        self.length: int | None = None
        self.exhausted = False
        self.nothing_to_do = False

    def open(self, healer: Healer[Any], *, nothing_to_do: bool) -> None:
        """Sets the Healer that reads the batches."""
        self._healer, self.nothing_to_do = healer, nothing_to_do

    def position(self) -> tuple[int, int]:
        """Returns the epoch, and `count` after the last step."""
        return self.epoch, self.count - self.received

    @property
    def received(self) -> int:
        """Number of batches that Trainer has received since the last step."""
        return 0 if self._healer is None else len(self._healer.run.data.unused) - len(self._pending)

    def go_to(self, epoch: int, count: int) -> None:
        """Sets the position of a checkpoint. The Healer itself rewinds the data."""
        self.epoch, self.count = epoch, count
        self._pending.clear()

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch.

        Raises EpochChanged after a rollback. After an unreadable batch, raises it between two
        steps. If the epoch ends within a step, raises it there, and yields the batches of that step
        again: Trainer steps only after the number of batches that it expects.
        """
        while self.has_batch():
            if not self.received:
                self._window.clear()
                if self._is_shorter:
                    raise EpochChanged
            self.count += 1
            self._window.append(self._pending.pop(0))
            yield self._window[-1]
        if self._is_shorter and self.received:
            self.count -= len(self._window)
            self._pending, self._window = self._window, []
            self._data_epoch = self.epoch
            raise EpochChanged

    def begin(self) -> int | None:
        """Prepares a call of `_run_epoch`. Call `has_batch` first.

        Returns:
            The number of batches that the call will receive, or None if unknown.
        """
        skipped_ids = self._open_healer.skipped_batch_ids
        self._skipped_at_begin, self.length = len(skipped_ids), None
        try:
            length = len(self._loader)
        except TypeError:
            return None
        rest = len(self._pending)
        epoch, first = self._next_id
        if epoch == self.epoch:
            skipped = [batch.index for batch in skipped_ids if batch.epoch == self.epoch]
            rest += length - first - sum(first <= index < length for index in skipped)
        self.length = self.count + rest
        return rest

    @property
    def _is_shorter(self) -> bool:
        """Whether batches were skipped since `begin` counted the rest of the epoch."""
        if self.length is None:
            return False
        return len(self._open_healer.skipped_batch_ids) > self._skipped_at_begin

    def has_batch(self) -> bool:
        """Whether this epoch has another batch. Reads that batch; may raise EpochChanged."""
        if not self._pending and not self.exhausted:
            self._read()
        return bool(self._pending) and self._data_epoch == self.epoch

    def correct_epoch(self, state: Any) -> None:
        """Sets `state.epoch`, because Trainer counts the rest of an epoch as a whole epoch."""
        if self.length:
            state.epoch = self.epoch + self.count / self.length

    def next_epoch(self) -> None:
        """Moves to the beginning of the next epoch."""
        self.epoch, self.count = self.epoch + 1, 0

    def stop(self) -> bool:
        """Reads the last decisions when Trainer stops. Returns whether the run was rolled back."""
        return self._open_healer.after_step(last=True)

    def abandon(self) -> None:
        """Drops the rest of the epoch, because a callback has stopped the epoch."""
        if self.stop():
            raise EpochChanged
        self._batches = None
        self._pending.clear()
        self.next_epoch()

    @property
    def _open_healer(self) -> Healer[Any]:
        assert self._healer is not None
        return self._healer

    @property
    def _next_id(self) -> BatchId:
        """The id of the next batch that the Healer reads."""
        loaders = self._open_healer.run.data.loaders
        number = loaders.number(self._loader)
        return BatchId(0, 0) if number is None else loaders[number].next_id

    def _read(self) -> None:
        healer = self._open_healer
        if self._batches is None:
            # After a restart this counts every epoch so far. Completed epochs are not read again.
            epoch, index = self._next_id
            epochs = max(self.epoch - epoch + (not index), 1)
            self._set_epoch(max(self.epoch, epoch))
            self._batches = healer.batches(self._loader, epochs=epochs)
        rollbacks = healer.rollbacks
        try:
            self._pending = [next(self._batches)]
            self._data_epoch = healer.run.data.unused[-1].epoch
        except StopIteration:
            self._batches = None
        except EmptyLoader as error:
            if error.epoch == 0:
                raise
            self._batches, self.exhausted = None, True
        if healer.rollbacks != rollbacks:
            raise EpochChanged

    def _set_epoch(self, epoch: int) -> None:
        """Calls `set_epoch` on the same objects as `Trainer._run_epoch`."""
        inner = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for owner in (self._loader, inner):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)


def run_epochs(trainer: Any, feed: EpochFeed, run_epoch: Callable[..., None], call: Any) -> None:
    """Replaces one call of `_run_epoch`: runs the rest of the run up to the end of that epoch.

    In the last epoch, batches of further epochs replace skipped batches. The run then takes
    `max_steps` steps, and its learning-rate schedule ends as planned.

    Args:
        trainer: the Trainer.
        feed: the batches of the Trainer.
        run_epoch: Trainer's own `_run_epoch`.
        call: the keyword arguments of the replaced call.
    """
    state, control = trainer.state, trainer.control
    last = call["epoch"] >= state.num_train_epochs - 1
    per_step = trainer.args.gradient_accumulation_steps
    while feed.epoch <= call["epoch"] or last:
        if feed.nothing_to_do or state.global_step >= state.max_steps:
            control.should_training_stop = True
            return
        try:
            if feed.has_batch():
                rest = feed.begin()
                arguments = call | {"epoch": feed.epoch, "train_dataloader": feed}
                if rest is not None:
                    steps = math.ceil(rest / per_step)
                    arguments |= {"steps_in_epoch": rest, "num_update_steps_per_epoch": steps}
                run_epoch(**arguments)
                control = trainer.control
            if feed.exhausted and not control.should_training_stop:
                console.warning(
                    f"training ends at step {state.global_step} of {state.max_steps}: the data are "
                    "exhausted, and this IterableDataset cannot be read a second time"
                )
                control.should_training_stop = True
            if control.should_training_stop:
                if feed.stop():
                    continue
                return
            if control.should_epoch_stop:
                feed.abandon()
            elif not feed.has_batch():
                feed.next_epoch()
        except EpochChanged:
            continue
