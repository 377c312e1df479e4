"""`Counters`: what a Trainer counts in Python, as a part of the Healer's state."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers.trainer_callback import ExportableState

from healcore.runtime.driver import json_setting
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.epochs import EpochFeed
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer, Metrics

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
_Lengths: TypeAlias = dict[str, dict[str, tuple[list[Any], int]]]
"""Mode -> name of a metric -> its list, and the number of entries that the list had."""


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


def _lengths_of(metrics: Metrics) -> _Lengths:
    """The lists of some metrics, and how many entries each list has now."""
    lengths: _Lengths = {}
    for mode, lists in metrics.items():
        lengths[mode] = {}
        for name, values in lists.items():
            lengths[mode][name] = (values, len(values))
    return lengths


def _as_number(value: Any) -> Any:
    """Converts a tensor of one element to a Python number; returns other values unchanged."""
    if hasattr(value, "item"):
        return value.item()
    return value


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
