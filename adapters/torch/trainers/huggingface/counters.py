"""Saves and restores the Python counters of a `transformers.Trainer` together with the weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState

from healcore.runtime.driver import json_setting
from healcore.runtime.healer import Healer, loop_of

if TYPE_CHECKING:
    from healcore.torch.trainers.huggingface.epochs import EpochFeed

_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of `TrainerState` that count. Other fields (max_steps, save_steps, ...) are settings."""
_LOGGING = ("_total_loss_scalar", "_globalstep_last_logged")
_TOKENS = "_total_train_tokens"
_COUNTERS = ("current_flos", "_step", _TOKENS)
"""Attributes of Trainer, of TRL's GRPO and RLOO, and of TRL's SFT and DPO. Each may be absent."""
_SETTINGS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm"),
    *("lr_scheduler_type", "warmup_steps", "label_smoothing_factor", "bf16", "fp16"),
)
"""Fields of `TrainingArguments`."""


class CountsBefore:
    """The trainer's counts before a micro-batch. Copies one tensor, without a sync.

    TRL's trainers also count tokens and metrics in `compute_loss`. The metrics are lists with one
    entry per micro-batch since the last log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.step = trainer.state.global_step
        self.tokens_seen = trainer.state.num_input_tokens_seen
        self.tr_loss = trainer._tr_loss.clone()
        self.buffered = getattr(trainer, "_buffered_inputs", None)
        """GRPO's and RLOO's generated batches. A later micro-batch of the step replaces them."""
        self.counters = copy.deepcopy(_counters_of(trainer))
        metrics = getattr(trainer, "_metrics", None)
        self._lists = {
            mode: {name: (values, len(values)) for name, values in lists.items()}
            for mode, lists in (metrics if isinstance(metrics, dict) else {}).items()
            if isinstance(lists, dict)
        }

    def restore_in_loss(self) -> None:
        """Restores what `compute_loss` counts. Removes the list entries that were added since."""
        if _TOKENS in self.counters:
            setattr(self._trainer, _TOKENS, copy.deepcopy(self.counters[_TOKENS]))
        for mode, lists in self._lists.items():
            metrics = self._trainer._metrics[mode]
            metrics.clear()
            for name, (values, length) in lists.items():
                del values[length:]
                metrics[name] = values


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
        self._max_steps: int | None = None
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
        return {name: value for name, value in settings.items() if value is not None}

    def begin(self) -> None:
        """Begins the Trainer's sums of this `train()`, which exclude steps before a restart."""
        trainer, state = self.trainer, self.trainer.state
        trainer._tr_loss.zero_()
        trainer._total_loss_scalar = 0.0
        trainer._initial_global_step = trainer._globalstep_last_logged = state.global_step
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen

    def had_completed(self, healer: Healer[Any]) -> bool:
        """Whether an earlier start with the same `max_steps` completed the run."""
        same = self._max_steps == self.trainer.state.max_steps
        return loop_of(healer).data.had_completed and same

    def state_dict(self) -> dict[str, str]:
        """Returns the counters. Reads one scalar from the device."""
        trainer, state, before = self.trainer, self.trainer.state, self.before
        counters, loss = _counters_of(trainer), trainer._tr_loss
        fields = {name: getattr(state, name) for name in _STATE}
        feed = self._feed
        if (
            feed is not None
            and feed.received
            and before is not None
            and before.step == state.global_step
        ):
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
        self._max_steps = saved["max_steps"]
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
        metrics = getattr(trainer, "_metrics", None)  # TRL's metrics since the last log
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
