"""`HealedSteps`: the steps of a Trainer, in smaller parts if memory runs out.

After an out-of-memory error the window (the micro-batches of one step) is repeated in smaller
parts. After a network failure, for instance in a reward function, it is repeated unchanged. Batch
size and accumulation steps do not change, and no sample is lost.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

from torch import Tensor
from transformers import Trainer

from healcore.runtime.faults.microbatches import count_samples
from healcore.runtime.healer import Healer
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.trainers.hook import patched

HfTrainer: TypeAlias = Any
"""A `transformers.Trainer`, or a trainer of TRL with attributes of its own."""
Batch: TypeAlias = Any
"""A batch as the Trainer's dataloader yields it, usually a dictionary of tensors."""

_PAIRS = {"DPOTrainer", "RewardTrainer"}
"""Trainers whose batch has first all chosen rows, then all rejected rows."""
_INDIVISIBLE = {"KTOTrainer"}
"""Trainers whose batches cannot be split, because the loss compares samples with each other."""
_COUNTERS = ("current_flos", "_step", "_total_train_tokens")


class HealedSteps:
    """Calls `Trainer.training_step` within `Healer.microbatches`, and observes its losses.

    The Trainer divides the loss of a micro-batch, and calls `accelerator.backward`, inside of
    `training_step`. So a part of a micro-batch is trained on by the same method, with a `backward`
    that multiplies by the part's share. The sum of the gradients is then the gradient of the whole
    micro-batch, also if the loss is divided by the items of the window: the part's share of the
    items is passed as their number.

    Args:
        trainer: the Trainer.
        healer: the open Healer.
        loop: the `HealedLoop`, which receives the trainer's counts before each step as `before`.
        stack: closed when the training ends. Gradient checkpointing is then switched off again.
    """

    def __init__(
        self, trainer: HfTrainer, healer: Healer[Any], loop: Any, stack: ExitStack
    ) -> None:
        self._trainer = trainer
        self._healer = healer
        self._loop = loop
        self._stack = stack
        self._call: Callable[..., Tensor] = trainer.training_step
        self._at_first_part = True
        """Whether the next micro-batch is the first of a step."""
        stack.enter_context(patched(trainer, "training_step", self.training_step))

    def training_step(self, model: Any, inputs: Batch, items: Any = None) -> Tensor:
        """Trains on one micro-batch. Repeats the window if it does not fit or the network fails.

        Args:
            model: the model, wrapped as the Trainer calls it.
            inputs: the micro-batch, as the dataloader yields it.
            items: number of items that the loss of the whole window is divided by, or None.

        Returns:
            The loss that the Trainer adds to its sum, a scalar on the device.

        Raises:
            RunStopped: a single sample does not fit, or the budget is exhausted.
            Exception: an out-of-memory error, if the policy has no rule for it or the batch
                cannot be split; a network failure, after the retries of `[retry]`; any other error.
        """
        trainer = self._trainer
        if self._at_first_part:
            self._loop.before = CountsBefore(trainer)
        total: Any = 0.0
        parts = trainer_access_of(self._healer).parts(
            inputs,
            to_split=self._joined_pairs,
            to_inputs=self._separate_pairs,
            count=self._loss_items,
            split_obstacle=self._obstacle(),
            last_resort=lambda: self._checkpoint_activations(model),
        )
        for number, part in enumerate(parts):
            if part.first and (number or not self._at_first_part):  # the window is repeated
                self._loop.before.restore_in_loss()
                trainer._tr_loss.copy_(self._loop.before.loss)
                total = 0.0
            with part:
                total = total + self._train(model, self._separate_pairs(part.batch), items, part)
        self._at_first_part = trainer.accelerator.gradient_state.sync_gradients
        return total

    def _train(self, model: Any, inputs: Batch, items: Any, part: Any) -> Tensor:
        """Runs forward and backward on a part, and observes its loss."""
        accelerator, share = self._trainer.accelerator, part.weight
        backward = accelerator.backward

        def backward_of_part(loss: Tensor, **own: Any) -> None:
            backward(loss * share, **own)

        if share == 1.0:
            loss = self._call(model, inputs, items)
        else:
            if items is not None:
                items = items * share
            with patched(accelerator, "backward", backward_of_part):
                loss = self._call(model, inputs, items)
        # The loss is divided by the micro-batches or the items of the step, so that the sum over
        # the step is the step's loss. The Healer averages, and multiplies by the part's share.
        per_step = self._trainer.current_gradient_accumulation_steps
        self._healer.observe(loss if per_step == 1 else loss * per_step)
        return loss if share == 1.0 else loss * share

    def _loss_items(self, batch: Any) -> int:
        """The number of tokens with a label, or of samples, that a mean loss averages over."""
        inputs = self._separate_pairs(batch)
        labels = None
        if isinstance(inputs, Mapping):
            labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return count_samples(batch)
        if getattr(self._trainer, "_loss_shifts_labels", True):
            labels = labels[..., 1:]  # the first token has no prediction
        return int(labels.ne(-100).sum())

    def _joined_pairs(self, inputs: Batch) -> Batch:
        """What is split of a micro-batch: (pairs, 2, ...) instead of (2 * pairs, ...)."""
        if not _is_one_of(self._trainer, _PAIRS):
            return inputs
        rows = max(len(value) for value in inputs.values() if isinstance(value, Tensor))
        joined = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, Tensor) and len(value) == rows:
                joined[name] = value.unflatten(0, (2, -1)).transpose(0, 1)
        return joined

    def _separate_pairs(self, part: Batch) -> Batch:
        """The inputs of a part of the result of `_joined_pairs`."""
        if not _is_one_of(self._trainer, _PAIRS):
            return part
        inputs = dict(part)
        for name, value in part.items():
            if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == 2:
                inputs[name] = value.transpose(0, 1).flatten(0, 1)
        return inputs

    def _obstacle(self) -> str:
        """Reason why a batch cannot be split, or an empty string."""
        trainer = self._trainer
        name = type(trainer).__name__
        if trainer.accelerator.num_processes > 1:
            return "the other ranks would wait for this rank"
        if _generates_batches(trainer):
            return f"{name} generates its batches: lower its batch or completion sizes"
        if _is_one_of(trainer, _INDIVISIBLE):
            return f"the loss of {name} compares the samples of a batch with each other"
        return ""

    def _checkpoint_activations(self, model: Any) -> str:
        """Switches gradient checkpointing on. Returns a message, or an empty string on failure."""
        unwrapped = self._trainer.accelerator.unwrap_model(model)
        name = "activation_checkpointing"
        if not hasattr(unwrapped, f"{name}_enable"):  # transformers before 5.20
            name = "gradient_checkpointing"
        on = getattr(unwrapped, f"is_{name}", True)
        if on or not getattr(unwrapped, "supports_gradient_checkpointing", False):
            return ""
        getattr(unwrapped, f"{name}_enable")()
        self._stack.callback(getattr(unwrapped, f"{name}_disable"))
        return "gradient checkpointing is now on"


class CountsBefore:
    """The trainer's counts before a step. Copies one tensor, without a sync.

    TRL's trainers also count tokens and metrics in `compute_loss`, an entry per micro-batch. After
    an out-of-memory error the micro-batches of a step are repeated, and a comparison of weights
    calls `compute_loss` as well. Without these copies, both would count twice.

    Args:
        trainer: the Trainer, between two micro-batches.

    Attributes:
        step: number of optimizer steps.
        tokens_seen: number of input tokens, `state.num_input_tokens_seen`.
        loss: a copy of the Trainer's sum of losses, float32 scalar on the device.
        counters: copies of the counts, by attribute of the Trainer.
    """

    def __init__(self, trainer: HfTrainer) -> None:
        self._trainer = trainer
        self.step = trainer.state.global_step
        self.tokens_seen = trainer.state.num_input_tokens_seen
        self.loss = trainer._tr_loss.clone()
        self.counters = counters_of(trainer)
        self._attributes = {**vars(trainer), **self.counters}
        self._lengths: dict[int, int] = {}
        for metrics in metrics_of(trainer):
            for lists in metrics.values():
                self._lengths.update({id(values): len(values) for values in lists.values()})

    def restore_in_loss(self) -> None:
        """Restores attributes that `compute_loss` may set. Removes list entries added since.

        The number of floating-point operations stays as it is: repeated operations were done too.
        Does not restore the sum of losses, to which only a complete micro-batch adds.
        """
        trainer, flos = self._trainer, self._trainer.current_flos
        vars(trainer).clear()
        vars(trainer).update(self._attributes)
        trainer.current_flos = flos
        for metrics in metrics_of(trainer):
            for lists in metrics.values():
                for name, values in list(lists.items()):
                    del values[self._lengths.get(id(values), 0) :]
                    if not values:
                        del lists[name]


def counters_of(trainer: HfTrainer) -> dict[str, Any]:
    """The counts that a step changes, by attribute. A trainer has only some of them."""
    found = {name: getattr(trainer, name) for name in _COUNTERS if hasattr(trainer, name)}
    return copy.deepcopy(found)


def metrics_of(trainer: HfTrainer) -> list[dict[str, Any]]:
    """TRL's metrics since the last log: mode -> name -> an entry for each micro-batch."""
    return [getattr(trainer, name, {}) for name in ("_metrics", "_stored_metrics")]


def loss_fn_of(trainer: HfTrainer) -> Callable[[Batch], Any] | None:
    """The trainer's own `compute_loss` of one batch, or None if its losses cannot be compared.

    Trainers that override `_prepare_inputs` (GRPO, RLOO), or do not train by `compute_loss` (Online
    DPO), train on completions that the current weights generate. The loss of such a batch does not
    measure the model: advantages have mean zero, so the loss is about 0 for any weights.

    Returns:
        A function of a batch, as the dataloader yields it. It changes no count and no log.
    """
    called = inspect.unwrap(type(trainer).training_step).__code__.co_names
    if _generates_batches(trainer) or {"compute_loss", "training_step"}.isdisjoint(called):
        return None

    def loss_of(batch: Batch) -> Any:
        # compute_loss may change its inputs, log, set attributes, and in TRL change metrics.
        inputs = trainer._prepare_inputs(copy.deepcopy(batch))
        given = {}
        items = trainer._get_num_items_in_batch([inputs], trainer.args.device)
        if items is not None:
            given["num_items_in_batch"] = items
        counts = CountsBefore(trainer)
        try:
            with patched(trainer, "log", silent), trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, inputs, **given)
        finally:
            counts.restore_in_loss()

    return loss_of


def silent(*_: Any, **__: Any) -> None:
    """Replaces a function that logs."""


def _generates_batches(trainer: HfTrainer) -> bool:
    """Whether the trainer makes its training data with the model that it trains (GRPO, RLOO)."""
    return type(trainer)._prepare_inputs is not Trainer._prepare_inputs


def _is_one_of(trainer: HfTrainer, names: set[str]) -> bool:
    """Whether a trainer is of a class of TRL, which need not be installed."""
    return any(kind.__name__ in names for kind in type(trainer).__mro__)
