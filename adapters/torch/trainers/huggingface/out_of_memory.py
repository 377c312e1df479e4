"""Repeats an accumulation window of a Trainer: in smaller parts when memory runs out.

After a failure in the network, of a reward function for instance, it is repeated as it was.

The effective batch stays exactly what it was: no batch size and no number of accumulation steps is
changed, and no sample is lost. A loss that is divided by the items of the whole window (tokens of
a causal language model) adds up over the parts; any other is weighted by the part's share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from healcore.core.verdict import Cause
from healcore.runtime.faults import classify
from healcore.runtime.healer import Healer
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes
from healcore.runtime.microbatches.splitting import (
    BatchSize,
    UnsplittableBatch,
    measure,
    split,
)
from healcore.torch.trainers.huggingface.counts import WindowCounts

_PAIRS = ("DPOTrainer", "RewardTrainer")
"""Trainers whose batch has all chosen rows first, and then the rejected ones."""
_WHOLE = ("KTOTrainer",)
"""Trainers whose loss compares the samples of a batch with each other: it cannot be split."""


class _MicroBatch(NamedTuple):
    model: Any
    inputs: Any
    items: Any
    """`num_items_in_batch` of the window; None: the loss is a mean over the micro-batch."""


class _Failure(NamedTuple):
    batch: _MicroBatch
    parts: int
    error: Exception


class SplitSteps:
    """Calls `Trainer.training_step`, in parts where a micro-batch has not fitted into memory.

    Args:
        trainer: the Trainer.
        policy: answers `oom`; `budget.shrinks` is the limit.
        healer: gives the function that has the open Healer.
        stack: closed when the training ends; gradient checkpointing is then off again.

    Attributes:
        sizes: what fits, as learnt so far.
        before: what the trainer had counted before the first micro-batch of this or the last step.
    """

    def __init__(
        self,
        trainer: Any,
        policy: HostPolicy,
        healer: Callable[[], Healer[Any]],
        stack: ExitStack,
    ) -> None:
        self._trainer = trainer
        self._answers = policy.answers(Cause.OOM)
        self._healer = healer
        self._stack = stack
        self.sizes = MicrobatchSizes(shrinks=policy.shrinks, grow_after=policy.refund_after)
        self.before: WindowCounts | None = None
        self._window: list[_MicroBatch] = []
        self._todo: list[_MicroBatch] = []
        self._restore: Callable[[], None] = lambda: None
        self._tokens = 0
        """Tokens that the micro-batches of the window have counted themselves."""
        self._attempt: Callable[..., tuple[Tensor | None, _Failure | None]] | None = None

    def training_step(
        self, own: Callable[..., Tensor], model: Any, inputs: Any, items: Any = None
    ) -> Tensor:
        """One micro-batch; redoes all of the window if it does not fit, or if the network fails.

        Raises:
            RunStopped: a single sample does not fit, or the budget is used.
            Exception: what `classify` calls OOM, if the policy has no rule for it or the batch
                cannot be split; a failure in the network, after `[retry]`; and every other error.
        """
        self._todo = [_MicroBatch(model, inputs, items)]
        if not self._window:
            self.before = WindowCounts(self._trainer)
            self._restore, self._tokens = self._healer().mark_step(), 0
            size = self._size(inputs) if self._why_not() is None else None
            if size is not None:
                self.sizes.grow(size, self._healer().step)
        self._window += self._todo
        attempt = self._attempt or self._repeated()
        while True:
            loss, failure = attempt(own)
            if failure is None:
                break
            self._shrink(failure)
            failure.error.__traceback__ = None  # its frames hold activations
            del failure
            self._take_back()
            if "clear_cache" in self._answers and torch.cuda.is_available():
                torch.cuda.empty_cache()
        if self._trainer.accelerator.gradient_state.sync_gradients:
            self._window.clear()
        assert loss is not None
        return loss

    def _repeated(self) -> Callable[..., tuple[Tensor | None, _Failure | None]]:
        """`_run`, again after a failure in the network (in a reward function, say)."""

        def attempt(own: Callable[..., Tensor]) -> tuple[Tensor | None, _Failure | None]:
            try:
                return self._run(own)
            except Exception as error:
                if classify(error).transient:
                    self._take_back()
                raise

        attempt.__qualname__ = f"{type(self._trainer).__name__}.training_step"
        self._attempt = attempt
        if self._trainer.accelerator.num_processes == 1:  # other ranks would wait within the step
            self._attempt = self._healer().retrying(attempt)
        return self._attempt

    def _take_back(self) -> None:
        """Makes everything as it was before the window, all of which is then to be done."""
        trainer, before = self._trainer, self.before
        for parameter in trainer.model.parameters():
            parameter.grad = None  # of all that the window has accumulated
        if before is not None:
            before.in_loss.restore()
            if "_step" in before.counters:
                trainer._step, trainer._buffered_inputs = before.counters["_step"], before.buffered
        trainer.state.num_input_tokens_seen -= self._tokens
        self._tokens = 0
        self._restore()
        self._todo = list(self._window)

    def _run(self, own: Callable[..., Tensor]) -> tuple[Tensor | None, _Failure | None]:
        """Loss of the last micro-batch to be done, or the error of one that did not fit."""
        loss, state = None, self._trainer.state
        for batch in self._todo:
            parts, tokens = 1, state.num_input_tokens_seen
            try:
                size = self._size(batch.inputs)
                if size is not None:
                    parts = self.sizes.parts(size)
                loss = self._in_parts(own, batch, parts)
            except Exception as error:
                if classify(error).cause is not Cause.OOM:
                    raise
                return None, _Failure(batch, parts, error)
            finally:
                self._tokens += state.num_input_tokens_seen - tokens
        return loss, None

    def _in_parts(self, own: Callable[..., Tensor], batch: _MicroBatch, parts: int) -> Tensor:
        if parts == 1:
            return own(batch.model, batch.inputs, batch.items)
        trainer, total = self._trainer, self._weight(batch.inputs)
        adds_up = self._adds_up(batch)
        steps, losses = trainer.current_gradient_accumulation_steps, []
        try:
            for part in split(self._rows(batch.inputs), parts):
                inputs = self._rows(part, back=True)
                if not adds_up:
                    weight = self._weight(inputs)
                    if not weight:
                        continue  # no token to train on: its mean would be 0 / 0
                    # Trainer divides the loss of each micro-batch by this number.
                    trainer.current_gradient_accumulation_steps = steps * total / weight
                losses.append(own(batch.model, inputs, batch.items))
        finally:
            trainer.current_gradient_accumulation_steps = steps
        return torch.stack(losses).sum()

    def _adds_up(self, batch: _MicroBatch) -> bool:
        """Whether the loss is divided by the items of the window; as in `Trainer.training_step`."""
        trainer = self._trainer
        scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = trainer.model_accepts_loss_kwargs and batch.items is not None
            scaled = by_model or trainer.compute_loss_func is not None
        return bool(scaled)

    def _weight(self, inputs: Any) -> int:
        """What a mean loss is a mean over: tokens with a label, or samples."""
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if isinstance(labels, Tensor) and labels.dim() > 1 and not labels.is_floating_point():
            shifted = getattr(self._trainer, "_loss_shifts_labels", True)
            return int((labels[..., 1:] if shifted else labels).ne(-100).sum())
        return measure(self._rows(inputs)).samples

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

    def _size(self, inputs: Any) -> BatchSize | None:
        """Its size; None: it is trained on whole, having no common number of samples, or no need.

        To raise here would lose a step that may well fit.
        """
        try:
            return measure(self._rows(inputs)) if self.sizes.limited else None
        except UnsplittableBatch:
            return None

    def _why_not(self) -> str | None:
        """Why a window cannot be done again in parts; None: it can."""
        from transformers import Trainer

        trainer = self._trainer
        name = type(trainer).__name__
        if "shrink_microbatch" not in self._answers:
            return 'the policy has no rule to = ["oom"], do = ["shrink_microbatch"], or observes'
        if trainer.accelerator.num_processes > 1:
            return "the other ranks would wait for this one"
        if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
            return f"{name} makes its batches itself: lower its batch or completion sizes"
        if _is_one_of(trainer, _WHOLE):
            return f"the loss of {name} compares the samples of a batch with each other"
        return None

    def _shrink(self, failure: _Failure) -> None:
        """Learns a smaller size, or switches gradient checkpointing on; raises if neither can."""
        healer, error = self._healer(), failure.error
        why_not = self._why_not()
        try:
            size = None if why_not else measure(self._rows(failure.batch.inputs))
        except UnsplittableBatch as problem:
            why_not, size = str(problem), None
        if size is None:
            error.add_note(f"healcore has not tried smaller parts of the batch: {why_not}")
            raise error
        try:
            resize = self.sizes.shrink(size, failure.parts, healer.step)
        except CannotShrink as problem:
            if self._checkpoint_activations(failure.batch.model):
                healer.report_fault(
                    error, f"{problem}: gradient checkpointing is on from now", "clear_cache"
                )
                return
            healer.stop(
                f"{problem}, with gradient checkpointing as far as the model has it; what takes "
                "less: shorter sequences, bf16=True, an 8-bit optimizer or LoRA, offloading"
            )
        else:
            healer.report_fault(
                error,
                f"{resize.before} of {resize.samples} samples do not fit into memory, the step is "
                f"done again with {resize.after} at a time",
                "shrink_microbatch",
            )

    def _checkpoint_activations(self, model: Any) -> bool:
        """Switches gradient checkpointing on; False if it was on, or the model has none."""
        own = self._trainer.accelerator.unwrap_model(model)
        name = "activation_checkpointing"
        if not hasattr(own, f"{name}_enable"):  # transformers before 5.20
            name = "gradient_checkpointing"
        on = getattr(own, f"is_{name}", True)
        if on or not getattr(own, "supports_gradient_checkpointing", False):
            return False
        getattr(own, f"{name}_enable")()
        self._stack.callback(getattr(own, f"{name}_disable"))
        return True


def _is_one_of(trainer: Any, names: tuple[str, ...]) -> bool:
    return any(kind.__name__ in names for kind in type(trainer).__mro__)
