"""`SplitSteps`: a Trainer's step, in smaller parts if memory runs out.

After an out-of-memory error the window (the micro-batches of one step) is repeated in smaller
parts. After a network failure, for instance in a reward function, it is repeated unchanged. Batch
size and accumulation steps do not change, and no sample is lost. A loss that is divided by the
items of the window (tokens of a causal language model) is summed over the parts. Any other loss is
weighted by the part's share of its micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from healcore.runtime.faults.microbatches import count_samples
from healcore.runtime.healer import Healer
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.batch_loss import loss_fn_of
from healcore.torch.trainers.huggingface.counters import Counters, CountsBefore
from healcore.torch.trainers.huggingface.trainer_internals import Batch, HfTrainer
from healcore.torch.trainers.patching import patched

_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers whose batch has first all chosen rows, then all rejected rows."""
_INDIVISIBLE = ("KTOTrainer",)
"""Trainers whose batches cannot be split, because the loss compares samples with each other."""


class SplitSteps:
    """Calls `Trainer.training_step` within `Healer.microbatches`, and observes its losses.

    The Trainer divides the loss of a micro-batch, and calls `accelerator.backward`, inside of
    `training_step`. So a part of a micro-batch is trained on by the same method, with a `backward`
    that multiplies by the part's share. The sum of the gradients is then the gradient of the whole
    micro-batch.

    Args:
        trainer: the Trainer.
        healer: the open Healer.
        counters: receives the trainer's counts before each step.
        stack: closed when the training ends. Gradient checkpointing is then switched off again.
    """

    def __init__(
        self, trainer: HfTrainer, healer: Healer[Any], counters: Counters, stack: ExitStack
    ) -> None:
        self._trainer = trainer
        self._healer = healer
        self._counters = counters
        self._stack = stack
        self._first_step = trainer.state.global_step
        self._access = trainer_access_of(healer)
        self._access.searches_batch_size = trainer.args.auto_find_batch_size
        self._at_first_part = True
        """Whether the next micro-batch is the first of a step."""
        self._tokens = 0
        """Number of tokens that `training_step` has counted itself in this window."""
        self._divides_by_items: bool | None = None
        """Whether the loss is divided by the items of the window, or None if unknown."""

    def training_step(
        self, original: Callable[..., Tensor], model: Any, inputs: Batch, items: Any = None
    ) -> Tensor:
        """Trains on one micro-batch. Repeats the window if it does not fit or the network fails.

        Args:
            original: the Trainer's own `training_step`, to which the other arguments are passed.
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
        if self._at_first_part:
            self._counters.before = CountsBefore(self._trainer)
            self._tokens = 0
            if self._trainer.state.global_step != self._first_step:
                self._access.searches_batch_size = False
        losses: list[Tensor] = []
        parts = self._access.parts(
            inputs,
            to_split=self._to_split,
            to_inputs=self._to_inputs,
            count=self._loss_items,
            split_obstacle=self._obstacle(),
            last_resort=lambda: self._checkpoint_activations(model),
        )
        for number, part in enumerate(parts):
            if part.first and (number or not self._at_first_part):  # the window is repeated
                losses.clear()
                assert self._counters.before is not None
                self._counters.before.restore_in_loss()
                self._trainer.state.num_input_tokens_seen -= self._tokens
                self._tokens = 0
            with part:
                loss = self._train(original, model, self._to_inputs(part.batch), items, part.weight)
                # A repeated window begins with parts of the earlier micro-batches.
                if part.batch["micro_batch"] == id(inputs):
                    losses.append(loss)
        self._at_first_part = self._trainer.accelerator.gradient_state.sync_gradients
        if len(losses) == 1:
            return losses[0]
        return torch.stack(losses).sum()

    def _train(
        self,
        call: Callable[..., Tensor],
        model: Any,
        inputs: Batch,
        items: Any,
        weight: float = 1.0,
    ) -> Tensor:
        """Runs forward and backward on a part whose share of its micro-batch is `weight`."""
        trainer, state = self._trainer, self._trainer.state
        per_step = trainer.current_gradient_accumulation_steps
        tokens = state.num_input_tokens_seen
        share = weight
        if weight != 1.0 and self._is_sum(inputs, items):
            share = 1.0
        backward = trainer.accelerator.backward

        def backward_of_part(loss: Tensor, **own: Any) -> None:
            if share != 1.0:
                loss = loss * share
            backward(loss, **own)

        try:
            with patched(trainer.accelerator, "backward", backward_of_part):
                loss = call(model, inputs, items)
        finally:
            self._tokens += state.num_input_tokens_seen - tokens
        # The loss is divided by the micro-batches or the items of the step, so that the sum over
        # the step is the step's loss. The Healer averages, and multiplies by the part's share.
        factor = per_step * share / weight
        observed = loss
        if factor != 1:
            observed = loss * factor
        self._healer.observe(observed)
        if share != 1.0:
            loss = loss * share
        return loss

    def _is_sum(self, inputs: Batch, items: Any) -> bool:
        """Whether the loss is divided by the items. An own `compute_loss` may ignore them."""
        loss_of = loss_fn_of(self._trainer)
        if self._divides_by_items is None and items is not None and loss_of is not None:
            losses_of = self._access.driver.losses_of
            once = functools.partial(loss_of, items=items)
            twice = functools.partial(loss_of, items=2 * items)
            self._divides_by_items = losses_of(once, [inputs]) != losses_of(twice, [inputs])
        return bool(self._divides_by_items)

    def _loss_items(self, batch: Any) -> int:
        """The number of tokens with a label, or of samples, that a mean loss averages over."""
        inputs = self._to_inputs(batch)
        labels = None
        if isinstance(inputs, Mapping):
            labels = inputs.get("labels")
        if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
            return count_samples(batch)
        if internals.shifts_labels(self._trainer):  # the first token has no prediction
            labels = labels[..., 1:]
        return int(labels.ne(-100).sum())

    def _to_split(self, inputs: Batch) -> dict[str, Any]:
        """What is split of a micro-batch: its inputs by pairs, and which micro-batch they are."""
        return {"inputs": self._pair_rows(inputs, join=True), "micro_batch": id(inputs)}

    def _to_inputs(self, part: Mapping[str, Any]) -> Batch:
        """The inputs of a part of the result of `_to_split`."""
        return self._pair_rows(part["inputs"], join=False)

    def _pair_rows(self, inputs: Batch, *, join: bool) -> Batch:
        """Joins the chosen and rejected row of each pair, or separates them again.

        A joined tensor is (pairs, 2, ...) instead of (2 * pairs, ...), so a split keeps each pair.
        """
        if not _is_instance_by_name(self._trainer, _PAIRS):
            return inputs
        tensors = [value for value in inputs.values() if isinstance(value, Tensor)]
        rows = max(map(len, tensors))
        changed = dict(inputs)
        for name, value in inputs.items():
            if not isinstance(value, Tensor) or len(value) != rows:
                continue
            if join:
                changed[name] = value.unflatten(0, (2, -1)).transpose(0, 1)
            elif value.dim() > 1 and value.shape[1] == 2:
                changed[name] = value.transpose(0, 1).flatten(0, 1)
        return changed

    def _obstacle(self) -> str:
        """Reason why a batch cannot be split, or an empty string."""
        trainer = self._trainer
        if self._access.searches_batch_size:
            return "the Trainer first tries a smaller batch (auto_find_batch_size)"
        name = type(trainer).__name__
        if trainer.accelerator.num_processes > 1:
            return "the other ranks would wait for this rank"
        if internals.generates_batches(trainer):
            return f"{name} generates its batches: lower its batch or completion sizes"
        if _is_instance_by_name(trainer, _INDIVISIBLE):
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


def _is_instance_by_name(trainer: HfTrainer, names: tuple[str, ...]) -> bool:
    """Whether a trainer is of a class of TRL, which need not be installed."""
    return any(kind.__name__ in names for kind in type(trainer).__mro__)
