"""`arctic_callbacks`: heals an ArcticTraining trainer through its own callbacks.

The callbacks use pre-events only: ArcticTraining checks the annotations of a post-event's method.
It requires that the first argument of a callback is called `self`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist

from healcore.core.errors import AttachError
from healcore.policy import PolicyLike
from healcore.runtime.run.ending.exits import EndRequested
from healcore.runtime.run_options import TrainerOptions
from healcore.runtime.store.store import Places
from healcore.torch.trainers.deepspeed import engine_state
from healcore.torch.trainers.hook import TrainerHook

_END = object()


def arctic_callbacks(
    policy: PolicyLike = "default",
    *,
    store: Places | Literal["auto"] = "auto",
    **options: Unpack[TrainerOptions],
) -> list[tuple[str, Callable[..., None]]]:
    """Callbacks that heal an ArcticTraining trainer: clip and skip steps, roll back, resume.

        class MyTrainer(SFTTrainer):
            name = "mine"
            callbacks = arctic_callbacks("default")

    While the trainer trains, `trainer.healcore` is its `healcore.Healer`. Between two optimizer
    steps, the ranks agree on ArcticTraining's reasons to stop (iteration limits, the kill switch).
    The same command resumes the run from the store.

    Args:
        policy: as for `healcore.Healer`.
        store: a directory for checkpoints, a list of them, a store, "auto" for `_healcore` in the
            `output_dir` of the recipe's first checkpoint, or None for host memory, which is lost
            with the process.
        **options: further arguments of `healcore.Healer` and values to replace in the policy.

    Returns:
        (event, function) pairs, for the class attribute `callbacks`.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """
    epochs = HealedEpochs(policy, options)

    def heal_before_training(self: Any) -> None:
        if self.global_step:
            raise AttachError(
                "auto_resume of the recipe's checkpoint conflicts with arctic_callbacks, which "
                "continues the run from its own store: set auto_resume to false"
            )
        where: Any = store
        if store == "auto":
            where = None
            if self.config.checkpoint:
                where = Path(self.config.checkpoint[0].output_dir, "_healcore")
        epochs.begin(self, where)

    def end_before_last_checkpoint(self: Any) -> None:
        # ArcticTraining sets its own count after the save, which is labelled with the count.
        epochs.set_counts()
        if self.training_finished:
            epochs.close(None)

    return [("pre-train", heal_before_training), ("pre-checkpoint", end_before_last_checkpoint)]


class HealedEpochs(TrainerHook):
    """Replaces `trainer.train_dataloader`: passes the Healer's batches, epoch by epoch.

    Args:
        policy: as for `TrainerHook`.
        options: as for `TrainerHook`.
    """

    def begin(self, trainer: Any, store: Places) -> None:
        """Opens the Healer, before the first epoch of a trainer.

        Args:
            trainer: the trainer, which gets the Healer as `healcore`.
            store: as for `healcore.Healer`.
        """
        config, engine = trainer.config, trainer.model
        per_step = engine.gradient_accumulation_steps()
        state = engine_state(engine)
        state["optimizer"].run_settings = {
            "epochs": config.epochs,
            "train_iters": config.train_iters,
            "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": per_step,
        }
        self._access = self._open(self._policy, state, store=store)
        assert self.healer is not None
        healer = self._healer = trainer.healcore = self.healer
        self._trainer = trainer
        self._loader = trainer.train_dataloader
        self._own_early_exit: Callable[[], bool] = trainer.need_early_exit
        self._own_epoch: Callable[[], None] = trainer.epoch
        epochs = config.epochs
        if config.train_iters:
            epochs = math.ceil(config.train_iters * per_step / len(self._loader))
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
