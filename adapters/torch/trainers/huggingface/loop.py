"""`HealedLoop`: the loop of a Trainer, which a rollback can leave, and what it counts.

`Trainer._run_epoch` counts batches in local variables. Therefore a rollback raises an exception
through it, and `HealedLoop.run_epoch` calls it again for the rest of the restored epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from healcore import console
from healcore.runtime.data import EmptyLoader
from healcore.runtime.driver import json_setting
from healcore.runtime.healer import Healer
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.trainers.huggingface.steps import (
    Batch,
    CountsBefore,
    HfTrainer,
    counters_of,
    metrics_of,
)

_STATE = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of `TrainerState` that count. Other fields (max_steps, save_steps, ...) are settings."""
_SETTINGS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "label_smoothing_factor",
    "bf16",
    "fp16",
)
"""Fields of `TrainingArguments`."""


class RolledBack(BaseException):
    """Leaves `Trainer._run_epoch`, whose counts are wrong after a rollback."""


class HealedLoop:
    """Passes the Healer's batches to Trainer, epoch by epoch, and is a part of the Healer's state.

    Trainer calls `_run_epoch` once for each epoch. `run_epoch` replaces the call, and makes one or
    more calls of Trainer's own `_run_epoch`:

        run_epoch ─► _run_epoch: the rest of `epoch` ─► __iter__ yields batches ─► its end
             ▲                                                │
             └────────────── RolledBack ──────────────────────┘

    After a rollback `epoch` is the epoch of the checkpoint, which may be an earlier epoch. An epoch
    of Trainer has as many batches as Trainer expects: if batches were skipped, those of the next
    pass over the data follow. Within a step, the counts before the step are saved, because a resume
    repeats the step.

    Args:
        trainer: the Trainer.
        loader: its train dataloader, or None for a run that cannot roll back.
        callback: the callback of this run, whose own state is not a count.

    Attributes:
        healer: the open Healer that reads the batches, which the caller sets; None before.
        before: the counts before the newest step, which the steps set; None before the first.
    """

    def __init__(
        self, trainer: HfTrainer, loader: Iterable[Batch] | None, callback: object
    ) -> None:
        self.healer: Healer[Any] | None = None
        self.before: CountsBefore | None = None
        self._trainer = trainer
        self._loader: Any = loader
        self._callback = callback
        self._saved_max_steps: int | None = None
        """`max_steps` of the run in the store, or None for a new run."""
        self._epoch = 0
        """Trainer's current epoch, from 0."""
        self._count = 0
        """Number of batches of this epoch that Trainer has received."""
        self._length = 1
        """Number of batches of an epoch."""
        self._batches: Iterator[Batch] | None = None
        self._pending: list[Batch] = []
        """A batch that was read and that Trainer has not received."""
        self._data_epoch = 0
        """The pass over the data that this batch is of."""

    # -- the epochs -----------------------------------------------------------------------------

    def run_epoch(self, original: Callable[..., None], **call: Any) -> None:
        """Replaces one call of `_run_epoch`: trains up to the end of that epoch.

        Args:
            original: Trainer's own `_run_epoch`.
            **call: the arguments of the replaced call.
        """
        assert self.healer is not None
        trainer, state = self._trainer, self._trainer.state
        access = trainer_access_of(self.healer)
        # A callback may have stopped the completed run early.
        completed = access.had_completed and self._saved_max_steps == state.max_steps
        self._length = call["steps_in_epoch"]
        while self._epoch <= call["epoch"]:
            if completed or state.global_step >= state.max_steps:
                trainer.control.should_training_stop = True
                return
            rest = self._length - self._count
            steps = math.ceil(rest / trainer.args.gradient_accumulation_steps)
            of_rest = {"epoch": self._epoch, "steps_in_epoch": rest, "train_dataloader": self}
            of_rest |= {"num_update_steps_per_epoch": steps, "resume_from_checkpoint": None}
            try:
                original(**{**call, **of_rest})
            except RolledBack:
                continue
            control = trainer.control
            if control.should_training_stop or control.should_epoch_stop:
                if self.healer.after_step(last=True):
                    continue  # the last steps have rolled the run back
                if control.should_training_stop:
                    access.save_completed()  # the Trainer loads its best model after this
                    return
                self._batches = None  # a callback drops the rest of the epoch
                self._pending.clear()
            self._epoch += 1
            self._count = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yields the rest of the epoch. Raises RolledBack after a rollback."""
        is_sized = has_length(self._loader)
        while self._count < self._length:
            if not self._pending:
                self._read()
            if not self._pending or (not is_sized and self._data_epoch > self._epoch):
                return
            self._count += 1
            yield self._pending.pop()

    def _read(self) -> None:
        """Reads the next batch into `_pending`. Stops the training if the data have ended."""
        assert self.healer is not None
        access, state = trainer_access_of(self.healer), self._trainer.state
        if self._batches is None:
            self._batches = access.batches(self._loader)
        rollbacks = self.healer.rollbacks
        try:
            self._pending = [next(self._batches)]
        except (EmptyLoader, StopIteration):
            console.warning(
                f"training ends at step {state.global_step} of {state.max_steps}: the data "
                "are exhausted, and this IterableDataset cannot be read a second time"
            )
            self._trainer.control.should_training_stop = True
            return
        self._data_epoch = access.pending[-1].epoch
        if self.healer.rollbacks != rollbacks:
            raise RolledBack

    def correct_epoch(self) -> None:
        """Sets `state.epoch`, because Trainer counts the rest of an epoch as a whole epoch.

        The log, the schedules of evaluations and saves, and other callbacks read this value.
        """
        self._trainer.state.epoch = self._epoch + self._count / self._length

    # -- a part of the Healer's state -----------------------------------------------------------

    @property
    def run_settings(self) -> dict[str, Any]:
        """The arguments that determine the training result, except the optimizer's.

        The seed is not one of them, because a resumed run has the random states of its checkpoint.
        A restart with other values says which differ, and does not return the old model.

        Returns:
            Name -> number, text or bool, without the values that JSON cannot hold.
        """
        args = self._trainer.args
        length = "max_steps"
        if args.max_steps <= 0:
            length = "num_train_epochs"
        settings = {}
        for name in (*_SETTINGS, length):
            setting = json_setting(getattr(args, name, None))
            if setting is not None:
                settings[name] = setting
        return settings

    def state_dict(self) -> dict[str, str]:
        """The counts, as one JSON string, because TrainerState holds None and text.

        Reads one scalar from the device.

        Returns:
            "json" -> a JSON object with the fields of TrainerState, the counts, the sums of the
            log, the states of other callbacks, and the position in the data.
        """
        trainer, state, before = self._trainer, self._trainer.state, self.before
        fields = {name: getattr(state, name) for name in _STATE}
        counters, loss, received = counters_of(trainer), trainer._tr_loss, 0
        if self.healer is not None:
            # A batch that was read ahead is not received.
            received = len(trainer_access_of(self.healer).pending) - len(self._pending)
        if received and before is not None and before.step == state.global_step:
            counters, loss = before.counters, before.loss
            fields["num_input_tokens_seen"] = before.tokens_seen
        saved = {
            "state": fields,
            "max_steps": state.max_steps,
            "attributes": {
                **counters,
                "_total_loss_scalar": trainer._total_loss_scalar,
                "_globalstep_last_logged": trainer._globalstep_last_logged,
            },
            "loss": float(loss),
            "callbacks": [[type(each).__name__, each.state()] for each in self._others()],
            "data": [self._epoch, self._count - received],
        }
        return {"json": json.dumps(saved, default=float)}  # some counts are tensors

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counts of the trainer and its callbacks.

        Drops what the undone steps have left: requests to stop, save or evaluate, generated
        batches, and metrics for the next log.

        Args:
            state: a result of `state_dict`.
        """
        trainer, saved = self._trainer, json.loads(state["json"])
        self._saved_max_steps = saved["max_steps"]
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in saved["attributes"].items():
            setattr(trainer, name, value)
        trainer._tr_loss.fill_(saved["loss"])
        for callback, (name, exported) in zip(self._others(), saved["callbacks"], strict=False):
            if type(callback).__name__ == name:
                for key, value in exported["attributes"].items():
                    setattr(callback, key, value)
        self._epoch, self._count = saved["data"]
        self._pending.clear()
        for flag in vars(trainer.control):
            setattr(trainer.control, flag, False)
        if hasattr(trainer, "_buffered_inputs"):  # completions that undone weights have generated
            trainer._buffered_inputs = None
        for metrics in metrics_of(trainer):
            metrics.get("train", {}).clear()

    def begin(self) -> None:
        """Resets the Trainer's sums, which were set before the Healer restored the steps.

        The Trainer logs means over the steps of this `train()`, and would divide by steps that
        another process has taken.
        """
        trainer, state = self._trainer, self._trainer.state
        trainer._tr_loss.zero_()
        trainer._total_loss_scalar = 0.0
        trainer._initial_global_step = state.global_step
        trainer._globalstep_last_logged = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen

    def _others(self) -> list[Any]:
        """Other callbacks with a state, such as EarlyStoppingCallback."""
        found = []
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState) and each is not self._callback:
                found.append(each)
        return found
