"""`EpochFeed`: runs the epochs of a Trainer, which a rollback can leave.

`Trainer._run_epoch` counts batches in local variables. Therefore a rollback raises an exception
through it, and `EpochFeed.run` calls it again for the rest of the restored checkpoint's epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from healcore import console
from healcore.runtime.data import BatchId, EmptyLoader
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.trainers.huggingface.trainer_internals import Batch, HfTrainer


class EpochChanged(BaseException):
    """Leaves `Trainer._run_epoch`, whose counts are wrong after a rollback or a skipped batch.

    `EpochFeed.run` catches this exception, and calls `_run_epoch` again for the rest of the epoch.
    """


class _Announced(NamedTuple):
    """The arguments about the epoch with which `_run_epoch` was called."""

    length: int | None
    """Number of batches of the epoch, or None if unknown."""
    skipped: int
    """Number of batches that the run had skipped by then."""


class EpochFeed:
    """Passes the Healer's batches to Trainer, epoch by epoch.

    Trainer calls `_run_epoch` once for each epoch. `run` replaces the call, and makes one or more
    calls of Trainer's own `_run_epoch`:

        run ─► _run_epoch: the rest of `epoch` ─► __iter__ yields batches ─► end of the epoch
         ▲                                             │
         └── EpochChanged: the counts of Trainer are wrong, after a rollback or a skipped batch

    After a rollback `epoch` is the epoch of the checkpoint, which may be an earlier epoch. `run`
    returns when the epoch that Trainer has asked for has ended.

    Args:
        trainer: the Trainer.
        loader: its train dataloader.

    Attributes:
        healer: the open Healer that reads the batches; the caller sets it.
        epoch: Trainer's current epoch, from 0.
        count: number of batches of this epoch that Trainer has received. Lower than the loader's
            index if a rollback has skipped batches.
        nothing_to_do: whether an earlier start with the same `max_steps` completed the run. A
            callback may have stopped that run early.
    """

    def __init__(self, trainer: HfTrainer, loader: Iterable[Batch]) -> None:
        self.healer: Any = None
        self.epoch = 0
        self.count = 0
        self.nothing_to_do = False
        self._trainer = trainer
        self._loader: Any = loader
        self._announced = _Announced(None, 0)
        self._exhausted = False
        """Whether the data have ended and cannot be read again."""
        self._batches: Iterator[Batch] | None = None
        self._pending: list[Batch] = []
        """Batches that were read and that Trainer has not received."""
        self._window: list[Batch] = []
        """Batches that Trainer has received since the last step."""
        self._data_epoch = 0
        """Epoch of the pending batches."""

    @property
    def received(self) -> int:
        """Number of batches that Trainer has received since the last step.

        The Healer reads a batch before Trainer asks for one, so that a rollback can happen between
        two calls of `_run_epoch`. Such a batch is read and not yet received.

        Returns:
            0 before the Healer is open.
        """
        if self.healer is None:
            return 0
        read = len(trainer_access_of(self.healer).pending)
        return read - len(self._pending)

    def go_to(self, epoch: int, count: int) -> None:
        """Sets the position of a checkpoint. The Healer itself rewinds the data.

        Args:
            epoch: Trainer's epoch in the checkpoint, from 0.
            count: number of batches of this epoch that Trainer had received.
        """
        self.epoch = epoch
        self.count = count
        self._pending.clear()

    def correct_epoch(self, state: Any) -> None:
        """Sets `state.epoch`, because Trainer counts the rest of an epoch as a whole epoch.

        The log, the schedules of evaluations and saves, and other callbacks read this value.

        Args:
            state: the `TrainerState`, after a step.
        """
        length = self._announced.length
        if not length:  # Trainer then counts the batches of the whole run
            length = state.max_steps * self._trainer.args.gradient_accumulation_steps
        state.epoch = self.epoch + self.count / length

    def run(self, run_epoch: Callable[..., None], call: Mapping[str, Any]) -> None:
        """Replaces one call of `_run_epoch`: runs the rest of the run up to the end of that epoch.

        In the last epoch, batches of further epochs replace skipped batches. The run then takes
        `max_steps` steps, and its learning-rate schedule ends as planned.

        Args:
            run_epoch: Trainer's own `_run_epoch`.
            call: the keyword arguments of the replaced call.
        """
        trainer, state = self._trainer, self._trainer.state
        last = call["epoch"] >= state.num_train_epochs - 1
        while self.epoch <= call["epoch"] or last:
            if self.nothing_to_do or state.global_step >= state.max_steps:
                trainer.control.should_training_stop = True
                return
            try:
                if self._has_batch():
                    arguments = {**call, "resume_from_checkpoint": None}
                    arguments.update(self._arguments())
                    run_epoch(**arguments)
                self._stop_if_exhausted()
                control = trainer.control
                if control.should_training_stop or control.should_epoch_stop:
                    if self.healer.after_step(last=True):
                        continue  # the last steps have rolled the run back
                    if control.should_training_stop:
                        # The Trainer loads its best model after this.
                        trainer_access_of(self.healer).save_completed()
                        return
                    self._batches = None  # a callback drops the rest of the epoch
                    self._pending.clear()
                    last = last and self.epoch < call["epoch"]
                elif self._has_batch():
                    continue
                self.epoch += 1
                self.count = 0
            except EpochChanged:
                continue

    def _stop_if_exhausted(self) -> None:
        """Stops the training with a warning if the data cannot be read again."""
        state, control = self._trainer.state, self._trainer.control
        if not self._exhausted or control.should_training_stop:
            return
        console.warning(
            f"training ends at step {state.global_step} of {state.max_steps}: the data "
            "are exhausted, and this IterableDataset cannot be read a second time"
        )
        control.should_training_stop = True

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the epoch.

        Raises EpochChanged after a rollback. After an unreadable batch, raises it between two
        steps. If the epoch ends within a step, raises it there, and yields the batches of that step
        again: Trainer steps only after the number of batches that it expects.
        """
        while self._has_batch():
            if not self.received:
                self._window.clear()
                if self._is_shorter():
                    raise EpochChanged
            self.count += 1
            self._window.append(self._pending.pop(0))
            yield self._window[-1]
        if self._is_shorter() and self.received:
            self.count -= len(self._window)
            self._pending = self._window
            self._window = []
            self._data_epoch = self.epoch
            raise EpochChanged

    def _arguments(self) -> dict[str, Any]:
        """The arguments of `_run_epoch` for the rest of the epoch, whose first batch is pending."""
        skipped_ids = trainer_access_of(self.healer).loaders.skipped_ids()
        self._announced = _Announced(None, len(skipped_ids))
        arguments: dict[str, Any] = {"epoch": self.epoch, "train_dataloader": self}
        try:
            length = len(self._loader)
        except TypeError:
            return arguments
        rest = len(self._pending)
        epoch, first = self._next_id()
        if epoch == self.epoch:
            rest += length - first
            for skipped in skipped_ids:
                if skipped.epoch == self.epoch and first <= skipped.index < length:
                    rest -= 1
        self._announced = _Announced(self.count + rest, len(skipped_ids))
        steps = math.ceil(rest / self._trainer.args.gradient_accumulation_steps)
        return {**arguments, "steps_in_epoch": rest, "num_update_steps_per_epoch": steps}

    def _is_shorter(self) -> bool:
        """Whether batches were skipped since `_arguments` counted the rest of the epoch."""
        skipped = len(trainer_access_of(self.healer).loaders.skipped_ids())
        return self._announced.length is not None and skipped > self._announced.skipped

    def _has_batch(self) -> bool:
        """Whether this epoch has another batch. Reads that batch; may raise EpochChanged."""
        if not self._pending and not self._exhausted:
            self._read()
        return bool(self._pending) and self._data_epoch == self.epoch

    def _read(self) -> None:
        """Reads the next batch into `_pending`, which stays empty if the data have ended.

        Raises EpochChanged if the Healer has rolled the run back before it read this batch.
        """
        healer, batches = self.healer, self._batches
        if batches is None:
            # After a restart: the number of all epochs so far. Completed epochs are not read.
            epoch, index = self._next_id()
            epochs = self.epoch - epoch
            if index == 0:  # the data are at the start of an epoch, which is read too
                epochs += 1
            epochs = max(epochs, 1)
            # `Trainer._run_epoch` calls `set_epoch` on the same objects.
            sampler: Any = getattr(self._loader, "batch_sampler", None)
            owners: Any = self._loader, getattr(sampler, "batch_sampler", None)
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(max(self.epoch, epoch))
            access = trainer_access_of(healer)
            self._batches = batches = access.batches(self._loader, epochs=epochs)
        rollbacks = healer.rollbacks
        try:
            self._pending = [next(batches)]
            self._data_epoch = trainer_access_of(healer).pending[-1].epoch
        except StopIteration:
            self._batches = None
        except EmptyLoader as error:
            if error.epoch == 0:
                raise
            self._batches = None
            self._exhausted = True
        if healer.rollbacks != rollbacks:
            raise EpochChanged

    def _next_id(self) -> BatchId:
        """The id of the next batch that the Healer reads."""
        return trainer_access_of(self.healer).loaders.next_id
