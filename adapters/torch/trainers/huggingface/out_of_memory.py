"""Repeats an accumulation window of a Trainer: in smaller parts when memory runs out.

After a failure in the network, of a reward function for instance, it is repeated as it was.

The effective batch stays exactly what it was: no batch size and no number of accumulation steps is
changed, and no sample is lost. A loss that is divided by the items of the whole window (tokens of
a causal language model) adds up over the parts; any other is weighted by the part's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from healcore.core.verdict import Cause
from healcore.runtime.faults import classify
from healcore.runtime.healer import Healer
from healcore.runtime.microbatches.splitting import measure
from healcore.torch.trainers.huggingface.progress import WindowCounts

_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers whose batch has all chosen rows first, and then the rejected ones."""
_WHOLE = ("KTOTrainer",)
"""Trainers whose loss compares the samples of a batch with each other: it cannot be split."""


class SplitSteps:
    """Calls `Trainer.training_step` within `Healer.microbatches`, and observes its losses.

    Args:
        trainer: the Trainer.
        healer: returns the open Healer.
        stack: closed when the training ends; gradient checkpointing is then off again.

    Attributes:
        before: what the trainer had counted before the first micro-batch of this or the last step.
    """

    def __init__(self, trainer: Any, healer: Callable[[], Healer[Any]], stack: ExitStack) -> None:
        self._trainer = trainer
        self._healer = healer
        self._stack = stack
        self.before: WindowCounts | None = None
        self._window: list[Any] = []
        """Inputs of the micro-batches since the last step."""
        self._todo: list[Any] = []
        """Those that the next attempt trains on."""
        self._begun = False
        """Whether a part of the window was trained on."""
        self._tokens = 0
        """Tokens that `training_step` has counted itself, in this window."""
        self._gradients: Any = None
        self._attempt: Callable[..., Tensor] | None = None

    def training_step(
        self, own: Callable[..., Tensor], model: Any, inputs: Any, items: Any = None
    ) -> Tensor:
        """One micro-batch; redoes the whole window if it does not fit, or if the network fails.

        Raises:
            RunStopped: a single sample does not fit, or the budget is used.
            Exception: what `classify` calls OOM, if the policy has no rule for it or the batch
                cannot be split; a failure in the network, after `[retry]`; and every other error.
        """
        attempt = self._attempt or self._repeated()
        if not self._window:
            self.before = WindowCounts(self._trainer)
            self._gradients.begin_window()
            self._begun, self._tokens = False, 0
        self._window.append(inputs)
        self._todo = [inputs]
        loss = attempt(own, model, items)
        if self._trainer.accelerator.gradient_state.sync_gradients:
            self._window.clear()
        return loss

    def _repeated(self) -> Callable[..., Tensor]:
        """`_run`, and again with the whole window after a failure in the network."""

        def attempt(*args: Any) -> Tensor:
            try:
                return self._run(*args)
            except Exception as error:
                if classify(error).transient:
                    self._gradients.redo_window([], clear_cache=False)
                    self._restore_counts()
                    self._todo = list(self._window)
                raise

        attempt.__qualname__ = f"{type(self._trainer).__name__}.training_step"
        self._gradients = self._healer().driver.gradient_window()
        alone = self._trainer.accelerator.num_processes == 1  # others would wait within the step
        self._attempt = self._healer().retrying(attempt) if alone else attempt
        return self._attempt

    def _run(self, own: Callable[..., Tensor], model: Any, items: Any) -> Tensor:
        """Trains on `_todo`; returns the loss of its last micro-batch."""
        found: list[Tensor] = []
        for inputs in self._todo:
            found.clear()
            if why_not := self._why_not():
                try:
                    found.append(self._train(own, model, inputs, items))
                except Exception as error:
                    if classify(error).cause is Cause.OOM:
                        error.add_note(f"healcore has not tried smaller parts: {why_not}")
                    raise
                continue
            batch = {"inputs": self._rows(inputs), "of": id(inputs)}
            count = None if self._adds_up(items) else self._count
            for part in self._healer().microbatches(
                batch, count=count, last_resort=lambda: self._checkpoint_activations(model)
            ):
                if part.first and self._begun:
                    found.clear()
                    self._restore_counts()
                with part:
                    self._begun = True
                    rows = self._rows(part.batch["inputs"], back=True)
                    loss = self._train(own, model, rows, items, part.weight)
                    if part.batch["of"] == id(inputs):  # not of an earlier one that comes again
                        found.append(loss)
        return found[0] if len(found) == 1 else torch.stack(found).sum()

    def _train(
        self, own: Callable[..., Tensor], model: Any, inputs: Any, items: Any, weight: float = 1.0
    ) -> Tensor:
        """Forward and backward pass of a part of a micro-batch; `weight` is its share."""
        trainer, state = self._trainer, self._trainer.state
        per_step, tokens = trainer.current_gradient_accumulation_steps, state.num_input_tokens_seen
        factor = per_step if weight == 1.0 else per_step / weight
        if not self._adds_up(items):
            # Trainer divides the loss of each micro-batch by this number.
            trainer.current_gradient_accumulation_steps = factor
        try:
            loss = own(model, inputs, items)
        finally:
            trainer.current_gradient_accumulation_steps = per_step
            self._tokens += state.num_input_tokens_seen - tokens
        # See `signals.observed_losses`. The Healer weights it by the part's share.
        self._healer().observe(loss if factor == 1 else loss * factor)
        return loss

    def _restore_counts(self) -> None:
        """Restores what the trainer had counted before the window."""
        trainer, before = self._trainer, self.before
        assert before is not None
        before.in_loss.restore()
        if "_step" in before.counters:
            trainer._step, trainer._buffered_inputs = before.counters["_step"], before.buffered
        trainer.state.num_input_tokens_seen -= self._tokens
        self._begun, self._tokens = False, 0

    def _adds_up(self, items: Any) -> bool:
        """Whether the loss is divided by the items of the window; as in `Trainer.training_step`."""
        trainer = self._trainer
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return bool(scaled)

    def _count(self, batch: Any) -> int:
        """What a mean loss is a mean over: tokens with a label, or samples."""
        inputs = self._rows(batch["inputs"], back=True)
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
            shifted = getattr(self._trainer, "_loss_shifts_labels", True)
            return int((labels[..., 1:] if shifted else labels).ne(-100).sum())
        return measure(batch).samples

    def _rows(self, inputs: Any, *, back: bool = False) -> Any:
        """Inputs with one row for each sample, and `back`.

        A pair's chosen and rejected row become one: (pairs, 2, ...) instead of (2 * pairs, ...).
        """
        if not _is_one_of(self._trainer, _PAIRS):
            return inputs
        rows = max(len(each) for each in inputs.values() if isinstance(each, Tensor))
        changed = dict(inputs)
        for name, each in inputs.items():
            if not isinstance(each, Tensor) or len(each) != rows:
                continue
            if not back:
                changed[name] = each.unflatten(0, (2, -1)).transpose(0, 1)
            elif each.dim() > 1 and each.shape[1] == 2:
                changed[name] = each.transpose(0, 1).flatten(0, 1)
        return changed

    def _why_not(self) -> str:
        """Why a window cannot be done again in parts, or an empty string."""
        from transformers import Trainer

        trainer = self._trainer
        name = type(trainer).__name__
        if trainer.accelerator.num_processes > 1:
            return "the other ranks would wait for this one"
        if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
            return f"{name} makes its batches itself: lower its batch or completion sizes"
        if _is_one_of(trainer, _WHOLE):
            return f"the loss of {name} compares the samples of a batch with each other"
        return ""

    def _checkpoint_activations(self, model: Any) -> str:
        """Switches gradient checkpointing on; "" if it was on, or the model has none."""
        own = self._trainer.accelerator.unwrap_model(model)
        name = "activation_checkpointing"
        if not hasattr(own, f"{name}_enable"):  # transformers before 5.20
            name = "gradient_checkpointing"
        on = getattr(own, f"is_{name}", True)
        if on or not getattr(own, "supports_gradient_checkpointing", False):
            return ""
        getattr(own, f"{name}_enable")()
        self._stack.callback(getattr(own, f"{name}_disable"))
        return "gradient checkpointing is on from now"


def _is_one_of(trainer: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(trainer).__mro__)
