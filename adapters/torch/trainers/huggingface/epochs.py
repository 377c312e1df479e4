"""Runs Trainer's epochs so that a rollback can return to an earlier epoch.

`Trainer._run_epoch` counts batches in local variables. So a rollback leaves it by an exception, and
it is called again for the rest of the epoch of the restored checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback

from healcore import console
from healcore.runtime.data.epoch_reader import EmptyLoader
from healcore.runtime.healer import Healer
from healcore.torch.trainers.huggingface.train_data import RewindableBatches


class EpochChanged(BaseException):
    """Leaves `Trainer._run_epoch`, whose counts are wrong after a rollback or a skipped batch.

    `run_epochs` catches it, and calls `_run_epoch` again for the rest of the epoch.
    """


class EpochFeed:
    """Hands the Healer's batches to Trainer, epoch by epoch.

    Attributes:
        epoch: the epoch that Trainer is in.
        count: batches of that epoch that Trainer has received. Lower than the loader's own index if
            a rollback has skipped batches.
        length: number of batches of this epoch, or None if it is not known.
        exhausted: whether the data have ended and do not begin again.
        nothing_to_do: whether the run had completed before this start, with the same `max_steps`.
            A callback may have stopped that run early.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._data = RewindableBatches(loader)
        self._healer: Healer[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._held: list[Any] = []
        """Batches that were read and that Trainer has not received."""
        self._window: list[Any] = []
        """Batches that Trainer has received since the last step."""
        self._left_out = 0
        """Number of skipped batches when `_run_epoch` was called."""
        self._data_epoch = 0
        self.epoch = 0
        self.count = 0
        self.length: int | None = None
        self.exhausted = False
        self.nothing_to_do = False

    def open(self, healer: Healer[Any], *, nothing_to_do: bool) -> None:
        """Takes the Healer that reads the batches."""
        self._healer, self.nothing_to_do = healer, nothing_to_do

    def position(self) -> tuple[int, int]:
        """Epoch and `count` after the last step."""
        return self.epoch, self.count - self.received

    @property
    def received(self) -> int:
        """Batches that Trainer has received since the last step."""
        return 0 if self._healer is None else len(self._healer.run.data.unused) - len(self._held)

    def go_to(self, epoch: int, count: int) -> None:
        """Takes the position of a checkpoint; the Healer moves the data itself."""
        self.epoch, self.count = epoch, count
        self._held.clear()

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch.

        Raises EpochChanged after a rollback. After an unreadable batch it does so between two
        steps, or where the epoch has ended within a step: Trainer receives the batches of that step
        again, because it steps only after as many batches as it expects.
        """
        while self.has_batch():
            if not self.received:
                self._window.clear()
                if self._is_shorter:
                    raise EpochChanged
            self.count += 1
            self._window.append(self._held.pop(0))
            yield self._window[-1]
        if self._is_shorter and self.received:
            self.count -= len(self._window)
            self._held, self._window = self._window, []
            self._data_epoch = self.epoch
            raise EpochChanged

    def begin(self) -> int | None:
        """Begins a call of `_run_epoch`, after `has_batch`.

        Returns:
            The number of batches that it will receive, or None if that is not known.
        """
        left_out = self._open.skipped_batch_ids
        self._left_out, self.length = len(left_out), None
        try:
            length = len(self._loader)
        except TypeError:
            return None
        rest = len(self._held)
        if self._data.epoch == self.epoch:
            first = self._data.index
            skipped = [each.index for each in left_out if each.epoch == self.epoch]
            rest += length - first - sum(first <= index < length for index in skipped)
        self.length = self.count + rest
        return rest

    @property
    def _is_shorter(self) -> bool:
        """Whether batches were skipped since `begin`, which has counted them."""
        return self.length is not None and len(self._open.skipped_batch_ids) > self._left_out

    def has_batch(self) -> bool:
        """Whether there is another batch of this epoch. Reads it; may raise EpochChanged."""
        if not self._held and not self.exhausted:
            self._read()
        return bool(self._held) and self._data_epoch == self.epoch

    def next_epoch(self) -> None:
        """Goes to the next epoch, once this one has no more batches."""
        self.epoch, self.count = self.epoch + 1, 0

    def stop(self) -> bool:
        """Reads the last decisions when Trainer stops. Returns whether the run was rolled back."""
        return self._open.after_step(last=True)

    def abandon(self) -> None:
        """Drops the rest of the epoch, which a callback has stopped."""
        if self.stop():
            raise EpochChanged
        self._batches = None
        self._held.clear()
        self.next_epoch()

    @property
    def _open(self) -> Healer[Any]:
        assert self._healer is not None
        return self._healer

    def _read(self) -> None:
        healer = self._open
        if self._batches is None:
            # After a restart these are all epochs so far; the finished ones are not read again.
            done = self._data.epoch if self._data.index else self._data.epoch - 1
            epochs = max(self.epoch - done, 1)
            self._batches = healer.batches(self._data, epochs=epochs)
        rollbacks = healer.rollbacks
        try:
            self._held = [next(self._batches)]
            self._data_epoch = self._data.epoch
        except StopIteration:
            self._batches = None
        except EmptyLoader as error:
            if error.epoch == 0:
                raise
            self._batches, self.exhausted = None, True
        if healer.rollbacks != rollbacks:
            raise EpochChanged


class EpochFraction(TrainerCallback):
    """Corrects `state.epoch` after a rollback: Trainer takes the rest of an epoch for a whole one.

    It has to be the first of the callbacks, so that the others read the corrected value.
    """

    def __init__(self, feed: EpochFeed) -> None:
        self._feed = feed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Sets `state.epoch`."""
        if self._feed.length:
            state.epoch = self._feed.epoch + self._feed.count / self._feed.length


def run_epochs(trainer: Any, feed: EpochFeed, run_epoch: Callable[..., None], call: Any) -> None:
    """Carries out one call of `_run_epoch`: the rest of the run up to the end of that epoch.

    In the last epoch, batches of further epochs replace skipped batches, so that the run takes
    `max_steps` steps and its learning-rate schedule ends where it was to end.

    Args:
        trainer: the Trainer.
        feed: its batches.
        run_epoch: Trainer's own `_run_epoch`.
        call: the keyword arguments of the call.
    """
    state, control = trainer.state, trainer.control
    last = call["epoch"] >= state.num_train_epochs - 1
    per_step = trainer.args.gradient_accumulation_steps
    while feed.epoch <= call["epoch"] or last:
        if feed.nothing_to_do or state.global_step >= state.max_steps:
            control.should_training_stop = True  # the run had completed before this start
            return
        try:
            if feed.has_batch():
                rest = feed.begin()
                own = call | {"epoch": feed.epoch, "train_dataloader": feed}
                if rest is not None:
                    steps = math.ceil(rest / per_step)
                    own |= {"steps_in_epoch": rest, "num_update_steps_per_epoch": steps}
                run_epoch(**own)
                control = trainer.control
            if feed.exhausted and not control.should_training_stop:
                console.warning(
                    f"the data have ended at step {state.global_step} of {state.max_steps}, and an "
                    "IterableDataset that cannot be read twice has one epoch: training ends here"
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
