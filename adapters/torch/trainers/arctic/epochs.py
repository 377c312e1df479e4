"""`HealedEpochs`: passes the batches of a Healer to the epochs of an ArcticTraining trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from healcore.runtime.healer import Healer
from healcore.runtime.run.ending.exits import EndRequested
from healcore.runtime.trainer_access import open_healer

_END = object()


class HealedEpochs:
    """Replaces `trainer.train_dataloader`: passes the Healer's batches, epoch by epoch.

    Args:
        trainer: the trainer, before its first epoch.
        healer: the Healer, which this class opens and ends.
    """

    def __init__(self, trainer: Any, healer: Healer[Any]) -> None:
        self._trainer = trainer
        self._healer = healer
        self._access = open_healer(healer)
        self._loader = trainer.train_dataloader
        self._own_early_exit: Callable[[], bool] = trainer.need_early_exit
        self._own_epoch: Callable[[], None] = trainer.epoch
        epochs = trainer.config.epochs
        train_steps = trainer.config.train_iters
        if train_steps:
            per_step = trainer.model.gradient_accumulation_steps()
            epochs = math.ceil(train_steps * per_step / len(self._loader))
        self._batches: Iterator[Any] = healer.batches(self._loader, epochs=epochs)
        self._pending: list[Any] = []
        """The first batch of the next epoch, if it was read."""
        self._request: EndRequested | None = None
        """Reason to stop before the end of the training, or None."""
        trainer.train_dataloader = self
        trainer.epoch = self._epoch
        trainer.need_early_exit = lambda: False  # asked between two steps, see `_must_end`
        self.set_counts()

    def close(self, error: BaseException | None) -> None:
        """Ends the Healer, which saves the last state or writes a postmortem.

        A second call does nothing.

        Args:
            error: the exception that ends the training. With None, an earlier request to stop ends
                the run, or the run is complete.
        """
        self._healer.close(error or self._request)

    def set_counts(self) -> None:
        """Copies the counts of the DeepSpeed engine, which a rollback changes, to the trainer.

        The trainer counts by itself, and labels its checkpoints and its log with its own counts.
        """
        trainer = self._trainer
        step = trainer.model.global_steps
        trainer.global_step = step
        trainer.train_batch_idx = trainer.model.micro_steps
        trainer.global_step_this_run = step - trainer.global_step_at_start_this_run

    def __len__(self) -> int:
        """Number of batches of an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the trainer's epoch, also from an earlier epoch after a rollback."""
        trainer = self._trainer
        last = trainer.epoch_idx
        while not self._must_end():
            self._pending = self._pending or [next(self._batches, _END)]
            batch = self._pending[0]
            if batch is _END:
                break
            epoch = self._access.pending[-1].epoch
            if epoch > last:
                break
            self.set_counts()
            trainer.epoch_idx = epoch
            self._pending.clear()
            yield batch
        trainer.epoch_idx = last

    def _must_end(self) -> bool:
        """Whether the training ends here: the trainer of any rank has a reason, between steps."""
        trainer, engine = self._trainer, self._trainer.model
        if engine.micro_steps % engine.gradient_accumulation_steps():
            return False
        stop = self._own_early_exit()
        if not _any_rank(stop, trainer.device):
            return False
        ends = trainer.global_step >= trainer.training_horizon
        if self._healer.after_step(last=ends):
            return False  # the last steps have rolled the run back
        if not ends:
            if not stop:
                trainer.early_stop_reason = "another rank has a reason to stop"
            self._request = EndRequested(trainer.early_stop_reason)
        trainer.early_stop = True
        return True

    def _epoch(self) -> None:
        """Replaces `trainer.epoch`: ends the Healer if the epoch raises."""
        try:
            self._own_epoch()
        except BaseException as error:
            self.close(error)
            raise


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is True on any rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = torch.tensor(float(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)
