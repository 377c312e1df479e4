"""Makes the Trainer's loop able to roll back: its epochs, and its Python counters.

`Trainer._run_epoch` counts batches in local variables. Therefore a rollback raises an exception
through it, and `EpochFeed.run` calls it again for the rest of the restored checkpoint's epoch.
`Counters` are saved and restored together with the weights.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformers.trainer_callback import ExportableState

from healcore import console
from healcore.runtime.data import BatchId, EmptyLoader
from healcore.runtime.driver import json_setting
from healcore.runtime.healer import hooks_of


class EpochChanged(BaseException):
    """Leaves `Trainer._run_epoch`, whose counts are wrong after a rollback or a skipped batch.

    `EpochFeed.run` catches this exception, and calls `_run_epoch` again for the rest of the epoch.
    """


class EpochFeed:
    """Passes the Healer's batches to Trainer, epoch by epoch.

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

    def __init__(self, trainer: Any, loader: Any) -> None:
        self.healer: Any = None
        self.epoch = self.count = 0
        self.nothing_to_do = False
        self._trainer = trainer
        self._loader = loader
        self._length: int | None = None
        """Number of batches of this epoch, or None if unknown."""
        self._exhausted = False
        """Whether the data have ended and cannot be read again."""
        self._batches: Iterator[Any] | None = None
        self._pending: list[Any] = []
        """Batches that were read and that Trainer has not received."""
        self._window: list[Any] = []
        """Batches that Trainer has received since the last step."""
        self._skipped_at_begin = 0
        """Number of skipped batches when `_run_epoch` was called."""
        self._data_epoch = 0
        """Epoch of the pending batches."""

    @property
    def received(self) -> int:
        """Number of batches that Trainer has received since the last step."""
        if self.healer is None:
            return 0
        return len(hooks_of(self.healer).read_position.pending) - len(self._pending)

    def go_to(self, epoch: int, count: int) -> None:
        """Sets the position of a checkpoint. The Healer itself rewinds the data."""
        self.epoch, self.count = epoch, count
        self._pending.clear()

    def correct_epoch(self, state: Any) -> None:
        """Sets `state.epoch`, because Trainer counts the rest of an epoch as a whole epoch."""
        # Without a length, Trainer counts the batches of the whole run.
        run = state.max_steps * self._trainer.args.gradient_accumulation_steps
        state.epoch = self.epoch + self.count / (self._length or run)

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
                    run_epoch(**{**call, "resume_from_checkpoint": None, **self._arguments()})
                control = trainer.control
                if self._exhausted and not control.should_training_stop:
                    console.warning(
                        f"training ends at step {state.global_step} of {state.max_steps}: the data "
                        "are exhausted, and this IterableDataset cannot be read a second time"
                    )
                    control.should_training_stop = True
                if control.should_training_stop or control.should_epoch_stop:
                    if self.healer.after_step(last=True):
                        continue  # the last steps have rolled the run back
                    if control.should_training_stop:
                        hooks_of(self.healer).save_completed()  # not the best model
                        return
                    self._batches = None  # a callback drops the rest of the epoch
                    self._pending.clear()
                    last &= self.epoch < call["epoch"]
                elif self._has_batch():
                    continue
                self.epoch, self.count = self.epoch + 1, 0
            except EpochChanged:
                continue

    def __iter__(self) -> Iterator[Any]:
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
            self._pending, self._window = self._window, []
            self._data_epoch = self.epoch
            raise EpochChanged

    def _arguments(self) -> dict[str, Any]:
        """The arguments of `_run_epoch` for the rest of the epoch, whose first batch is pending."""
        skipped_ids = hooks_of(self.healer).loaders.skipped_ids()
        self._skipped_at_begin, self._length = len(skipped_ids), None
        arguments: dict[str, Any] = {"epoch": self.epoch, "train_dataloader": self}
        try:
            length = len(self._loader)
        except TypeError:
            return arguments
        rest = len(self._pending)
        epoch, first = self._next_id()
        if epoch == self.epoch:
            skipped = [batch.index for batch in skipped_ids if batch.epoch == self.epoch]
            rest += length - first - sum(first <= index < length for index in skipped)
        self._length = self.count + rest
        steps = math.ceil(rest / self._trainer.args.gradient_accumulation_steps)
        return {**arguments, "steps_in_epoch": rest, "num_update_steps_per_epoch": steps}

    def _is_shorter(self) -> bool:
        """Whether batches were skipped since `_arguments` counted the rest of the epoch."""
        skipped = len(hooks_of(self.healer).loaders.skipped_ids())
        return self._length is not None and skipped > self._skipped_at_begin

    def _has_batch(self) -> bool:
        """Whether this epoch has another batch. Reads that batch; may raise EpochChanged."""
        if not self._pending and not self._exhausted:
            self._read()
        return bool(self._pending) and self._data_epoch == self.epoch

    def _read(self) -> None:
        healer, batches = self.healer, self._batches
        if batches is None:
            # After a restart this is the number of all epochs so far. Completed ones are not read.
            epoch, index = self._next_id()
            epochs = max(self.epoch - epoch + (not index), 1)
            # `Trainer._run_epoch` calls `set_epoch` on the same objects.
            sampler: Any = getattr(self._loader, "batch_sampler", None)
            owners: Any = self._loader, getattr(sampler, "batch_sampler", None)
            for owner in owners:
                if hasattr(owner, "set_epoch"):
                    owner.set_epoch(max(self.epoch, epoch))
            self._batches = batches = healer.batches(self._loader, epochs=epochs)
        rollbacks = healer.rollbacks
        try:
            self._pending = [next(batches)]
            self._data_epoch = hooks_of(healer).read_position.pending[-1].epoch
        except StopIteration:
            self._batches = None
        except EmptyLoader as error:
            if error.epoch == 0:
                raise
            self._batches, self._exhausted = None, True
        if healer.rollbacks != rollbacks:
            raise EpochChanged

    def _next_id(self) -> BatchId:
        """The id of the next batch that the Healer reads."""
        known = hooks_of(self.healer).loaders.find(self._loader)
        return BatchId(0, 0) if known is None else known.next_id


_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of `TrainerState` that count. Other fields (max_steps, save_steps, ...) are settings."""
_LOGGING = ("_total_loss_scalar", "_globalstep_last_logged")
_COUNTERS = ("current_flos", "_step", "_total_train_tokens")
"""Attributes of Trainer, of TRL's GRPO and RLOO, and of TRL's SFT and DPO. Each may be absent."""
_METRICS = ("_metrics", "_stored_metrics")
"""Attributes of TRL's trainers: metrics since the last log, by mode and name."""
_BATCH_SIZE = "per_device_train_batch_size"
_SETTINGS = (
    *(_BATCH_SIZE, "gradient_accumulation_steps", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "bf16", "fp16"),
)
"""Fields of `TrainingArguments`."""


def found_batch_size(settings: Mapping[str, Any], args: Any) -> int | None:
    """The batch size that `auto_find_batch_size` has found in the run with these settings, or None.

    Args:
        settings: `RunRecord.settings` of the run.
        args: the TrainingArguments of the program that continues the run.
    """
    size = settings.get(_BATCH_SIZE)
    return size * max(1, args.n_gpu) if args.auto_find_batch_size and type(size) is int else None


class CountsBefore:
    """The trainer's counts before a micro-batch. Copies one tensor, without a sync.

    TRL's trainers also count tokens and metrics in `compute_loss`, an entry per micro-batch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = trainer.state.global_step
        self.tokens_seen = trainer.state.num_input_tokens_seen
        self.tr_loss = trainer._tr_loss.clone()
        self.counters = copy.deepcopy(_counters_of(trainer))
        self._attributes = dict(vars(trainer))
        self._modes = [
            (modes, {mode: {n: (v, len(v)) for n, v in x.items()} for mode, x in modes.items()})
            for attribute in _METRICS
            if isinstance(modes := getattr(trainer, attribute, None), dict)
            if all(isinstance(lists, dict) for lists in modes.values())
        ]

    def restore_in_loss(self) -> None:
        """Restores attributes that `compute_loss` may set. Removes list entries added since."""
        attributes, flos = vars(self._trainer), self._trainer.current_flos
        attributes.clear()
        attributes.update(self._attributes | copy.deepcopy(self.counters) | {"current_flos": flos})
        for modes, before in self._modes:
            for mode, lists in modes.items():
                lists.clear()
                for name, (values, length) in before.get(mode, {}).items():
                    del values[length:]
                    lists[name] = values


class Counters:
    """The trainer's counters, as an entry of the Healer's state.

    The counters are one JSON string, because TrainerState holds None, text and dictionaries. Within
    a step, the counters before the step are saved, because a resume repeats the step.

    Args:
        trainer: the Trainer, in `on_train_begin`.
        feed: its batches, or None for a run that cannot roll back.
        callback: the callback of this run, whose own state is no counter.

    Attributes:
        before: the counts before the newest step, or None before the first step.
    """

    def __init__(self, trainer: Any, feed: EpochFeed | None, callback: object) -> None:
        self.trainer = trainer
        self.before: CountsBefore | None = None
        self._feed = feed
        self._callback = callback
        self.saved_max_steps: int | None = None
        """`max_steps` of the loaded run, or None."""

    @property
    def run_settings(self) -> dict[str, Any]:
        """The arguments that determine the training result, except the optimizer's.

        The seed is not one of them, because a resumed run has the random states of its checkpoint.
        """
        args = self.trainer.args
        length = "max_steps" if args.max_steps > 0 else "num_train_epochs"
        names = (*_SETTINGS, length)
        settings = {name: json_setting(_as_number(getattr(args, name, None))) for name in names}
        if args.auto_find_batch_size:  # the size that was found, with which a restart begins
            settings[_BATCH_SIZE] = self.trainer._train_batch_size // max(1, args.n_gpu)
        return {name: value for name, value in settings.items() if value is not None}

    def begin(self) -> None:
        """Resets the Trainer's sums: of this `train()`, without the steps before a restart."""
        trainer, state = self.trainer, self.trainer.state
        trainer._tr_loss.zero_()
        trainer._total_loss_scalar = 0.0
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen

    def state_dict(self) -> dict[str, str]:
        """The counters. Reads one scalar from the device."""
        trainer, state, before = self.trainer, self.trainer.state, self.before
        counters, loss = _counters_of(trainer), trainer._tr_loss
        fields = {name: getattr(state, name) for name in _STATE}
        feed = self._feed
        if feed and feed.received and before and before.step == state.global_step:
            counters, loss = before.counters, before.tr_loss
            fields["num_input_tokens_seen"] = before.tokens_seen
        saved = {
            "state": fields,
            "max_steps": state.max_steps,
            "counters": {name: _as_number(value) for name, value in counters.items()},
            "logging": {name: getattr(trainer, name) for name in _LOGGING},
            "tr_loss": float(loss),
            "callbacks": [[type(c).__name__, c.state()] for c in self._stateful_callbacks()],
            "data": None if feed is None else [feed.epoch, feed.count - feed.received],
        }
        return {"json": json.dumps(saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the trainer and its callbacks."""
        assert self._feed is not None
        trainer, saved = self.trainer, json.loads(state["json"])
        self.saved_max_steps = saved["max_steps"]
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in (saved["counters"] | saved["logging"]).items():
            setattr(trainer, name, value)
        trainer._tr_loss.fill_(saved["tr_loss"])
        callbacks = self._stateful_callbacks()
        for callback, (name, exported) in zip(callbacks, saved["callbacks"], strict=False):
            if type(callback).__name__ == name:
                for key, value in exported["attributes"].items():
                    setattr(callback, key, value)
        self._feed.go_to(*saved["data"])
        # Requests to stop, to save or to evaluate came from steps that are undone.
        for flag in vars(trainer.control):
            setattr(trainer.control, flag, False)
        if hasattr(trainer, "_buffered_inputs"):
            trainer._buffered_inputs = None  # completions that other weights have generated
        for attribute in _METRICS:
            metrics = getattr(trainer, attribute, None)
            if isinstance(metrics, dict) and "train" in metrics:
                metrics["train"].clear()

    def _stateful_callbacks(self) -> list[Any]:
        """Callbacks with a state, such as EarlyStoppingCallback."""
        callbacks = self.trainer.callback_handler.callbacks
        stateful = [each for each in callbacks if isinstance(each, ExportableState)]
        return [each for each in stateful if each is not self._callback]


def _counters_of(trainer: Any) -> dict[str, Any]:
    return {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)}


def _as_number(value: Any) -> Any:
    """Converts a tensor of one element to a Python number; returns other values unchanged."""
    return value.item() if hasattr(value, "item") else value
