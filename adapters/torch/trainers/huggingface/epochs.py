"""Makes the Trainer's loop able to roll back: its epochs, and its Python counters.

`Trainer._run_epoch` counts batches in local variables. Therefore a rollback raises an exception
through it, and `EpochFeed.run` calls it again for the rest of the restored checkpoint's epoch.
`Counters` are saved and restored together with the weights.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from transformers.trainer_callback import ExportableState

from healcore import console
from healcore.runtime.data import BatchId, EmptyLoader
from healcore.runtime.program_settings import json_setting
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.trainer_internals import Batch, HfTrainer, Metrics


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
        read = len(trainer_access_of(self.healer).read_position.pending)
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
                        trainer_access_of(self.healer).save_completed()  # not the best model
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
            self._batches = batches = healer.batches(self._loader, epochs=epochs)
        rollbacks = healer.rollbacks
        try:
            self._pending = [next(batches)]
            self._data_epoch = trainer_access_of(healer).read_position.pending[-1].epoch
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
        known = trainer_access_of(self.healer).loaders.find(self._loader)
        if known is None:
            return BatchId(0, 0)
        return known.next_id


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
_BATCH_SIZE = "per_device_train_batch_size"
_SETTINGS = (
    _BATCH_SIZE,
    "gradient_accumulation_steps",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "label_smoothing_factor",
    "bf16",
    "fp16",
)
"""Fields of `TrainingArguments`."""


def found_batch_size(settings: Mapping[str, Any], args: Any) -> int | None:
    """The batch size that `auto_find_batch_size` has found in the run with these settings, or None.

    Args:
        settings: `RunRecord.settings` of the run.
        args: the TrainingArguments of the program that continues the run.

    Returns:
        Samples of a batch, for all GPUs of this process together; None if the run has no such size.
    """
    size = settings.get(_BATCH_SIZE)
    if not args.auto_find_batch_size or type(size) is not int:
        return None
    return size * max(1, args.n_gpu)


class CountsBefore:
    """The trainer's counts before a micro-batch. Copies one tensor, without a sync.

    TRL's trainers also count tokens and metrics in `compute_loss`, an entry per micro-batch. After
    an out-of-memory error the micro-batches of a step are repeated, and a comparison of weights
    calls `compute_loss` as well. Without these copies, both would count twice.

    Args:
        trainer: the Trainer, between two micro-batches.

    Attributes:
        step: number of optimizer steps.
        tokens_seen: number of input tokens, `state.num_input_tokens_seen`.
        tr_loss: a copy of the sum of losses, float32 scalar on the device.
        counters: copies of the counts, by attribute of the Trainer.
    """

    def __init__(self, trainer: HfTrainer) -> None:
        self._trainer = trainer
        self.step = trainer.state.global_step
        self.tokens_seen = trainer.state.num_input_tokens_seen
        self.tr_loss = internals.loss_sum(trainer).clone()
        self.counters = copy.deepcopy(internals.counters(trainer))
        self._attributes = dict(vars(trainer))
        self._metrics: list[tuple[Metrics, _Lengths]] = []
        for metrics in internals.metrics(trainer):
            if all(isinstance(lists, dict) for lists in metrics.values()):
                self._metrics.append((metrics, _lengths_of(metrics)))

    def restore_in_loss(self) -> None:
        """Restores attributes that `compute_loss` may set. Removes list entries added since.

        The number of floating-point operations stays as it is: repeated operations were done too.
        Does not restore the sum of losses, to which only a complete micro-batch adds.
        """
        attributes = vars(self._trainer)
        flos = self._trainer.current_flos
        attributes.clear()
        attributes.update(self._attributes)
        attributes.update(copy.deepcopy(self.counters))
        attributes["current_flos"] = flos
        for metrics, before in self._metrics:
            for mode, lists in metrics.items():
                lists.clear()
                for name, (values, length) in before.get(mode, {}).items():
                    del values[length:]
                    lists[name] = values


_Lengths: TypeAlias = dict[str, dict[str, tuple[list[Any], int]]]
"""Mode -> name of a metric -> its list, and the number of entries that the list had."""


def _lengths_of(metrics: Metrics) -> _Lengths:
    """The lists of some metrics, and how many entries each list has now."""
    lengths: _Lengths = {}
    for mode, lists in metrics.items():
        lengths[mode] = {}
        for name, values in lists.items():
            lengths[mode][name] = (values, len(values))
    return lengths


class Counters:
    """The trainer's counters, as an entry of the Healer's state.

    The counters are one JSON string, because TrainerState holds None, text and dictionaries. Within
    a step, the counters before the step are saved, because a resume repeats the step.

    Args:
        trainer: the Trainer, in `on_train_begin`.
        feed: its batches, or None for a run that cannot roll back.
        callback: the callback of this run, whose own state is not a counter.

    Attributes:
        before: the counts before the newest step, or None before the first step.
    """

    def __init__(self, trainer: HfTrainer, feed: EpochFeed | None, callback: object) -> None:
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
        A restart with other values says which differ, and does not return the old model.

        Returns:
            Name -> number, text or bool, without the values that JSON cannot hold.
        """
        args = self.trainer.args
        length = "max_steps"
        if args.max_steps <= 0:
            length = "num_train_epochs"
        settings = {}
        for name in (*_SETTINGS, length):
            settings[name] = json_setting(_as_number(getattr(args, name, None)))
        if args.auto_find_batch_size:  # the size that was found, with which a restart begins
            size = internals.train_batch_size(self.trainer)
            settings[_BATCH_SIZE] = size // max(1, args.n_gpu)
        return {name: value for name, value in settings.items() if value is not None}

    def begin(self) -> None:
        """Resets the Trainer's sums: of this `train()`, without the steps before a restart.

        Call it after the Healer is open. The Trainer has set the sums before the Healer restored
        the number of steps, and would log means over too many steps.
        """
        internals.reset_sums(self.trainer)

    def state_dict(self) -> dict[str, str]:
        """The counters. Reads one scalar from the device.

        Returns:
            "json" -> a JSON object with the fields of TrainerState, the counts, the sums of the
            log, the states of other callbacks, and the position in the data.
        """
        trainer, state, before = self.trainer, self.trainer.state, self.before
        counters = internals.counters(trainer)
        loss = internals.loss_sum(trainer)
        fields = {name: getattr(state, name) for name in _STATE}
        feed, data = self._feed, None
        if feed is not None:
            if feed.received and before is not None and before.step == state.global_step:
                counters = before.counters
                loss = before.tr_loss
                fields["num_input_tokens_seen"] = before.tokens_seen
            data = [feed.epoch, feed.count - feed.received]
        callbacks = []
        for callback in self._stateful_callbacks():
            callbacks.append([type(callback).__name__, callback.state()])
        saved = {
            "state": fields,
            "max_steps": state.max_steps,
            "counters": {name: _as_number(value) for name, value in counters.items()},
            "logging": internals.logging_sums(trainer),
            "tr_loss": float(loss),
            "callbacks": callbacks,
            "data": data,
        }
        return {"json": json.dumps(saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the trainer and its callbacks.

        Drops what the undone steps have left: requests to stop, save or evaluate, generated
        batches, and metrics for the next log.

        Args:
            state: a result of `state_dict`.
        """
        assert self._feed is not None
        trainer, saved = self.trainer, json.loads(state["json"])
        self.saved_max_steps = saved["max_steps"]
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        for name, value in (saved["counters"] | saved["logging"]).items():
            setattr(trainer, name, value)
        internals.loss_sum(trainer).fill_(saved["tr_loss"])
        callbacks = self._stateful_callbacks()
        for callback, (name, exported) in zip(callbacks, saved["callbacks"], strict=False):
            if type(callback).__name__ == name:
                for key, value in exported["attributes"].items():
                    setattr(callback, key, value)
        self._feed.go_to(*saved["data"])
        # Requests to stop, to save or to evaluate came from steps that are undone.
        for flag in vars(trainer.control):
            setattr(trainer.control, flag, False)
        internals.drop_generated_batches(trainer)
        for metrics in internals.metrics(trainer):
            if "train" in metrics:
                metrics["train"].clear()

    def _stateful_callbacks(self) -> list[Any]:
        """Callbacks with a state, such as EarlyStoppingCallback."""
        stateful = []
        for each in self.trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState) and each is not self._callback:
                stateful.append(each)
        return stateful


def _as_number(value: Any) -> Any:
    """Converts a tensor of one element to a Python number; returns other values unchanged."""
    if hasattr(value, "item"):
        return value.item()
    return value
