"""A Trainer's gradient norm before clipping, its training log, and the loss of one batch.

Each context manager changes one Trainer for its block. The Trainer's arguments stay unchanged,
because every checkpoint saves them and trackers read them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Trainer

from healcore.runtime.incidents.ledger import ChangedMetrics
from healcore.torch.attachment import unwrapped
from healcore.torch.driver.weights import copied
from healcore.torch.trainers import replaced
from healcore.torch.trainers.huggingface.counters import LossCounts


@contextmanager
def unclipped(trainer: Any, limit: float | None) -> Iterator[None]:
    """Makes the Trainer measure the gradient norm for its log without clipping the gradients.

    The Trainer clips before the optimizer's step is judged: a norm of 700 would be judged as 1.0.
    With a `limit` the gradients are clipped afterwards. If the policy changes nothing, the result
    is bit-identical to the Trainer's own clipping, because the parameters are in the model's order.
    Without a `limit` the policy enforces the Trainer's limit, or there is none.
    """
    active = True  # other code may keep a reference to `measure_only` after the block

    def without_limit(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measure_only(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            return function(parameters, math.inf if active else max_norm, *args, **kwargs)

        return measure_only

    def clip(*_: Any) -> None:
        assert limit is not None
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), limit)

    accelerator = trainer.accelerator
    with ExitStack() as stack:
        measure = without_limit(accelerator.clip_grad_norm_)
        stack.enter_context(replaced(accelerator, "clip_grad_norm_", measure))
        # The Trainer clips parameters on several device meshes by a separate function.
        mixed = getattr(trainer, "_mixed_mesh_grad_norm", None)
        if mixed is not None:
            stack.enter_context(replaced(trainer, "_mixed_mesh_grad_norm", without_limit(mixed)))
        if limit is not None:
            hook: Any = torch.compiler.disable(clip)
            stack.callback(unwrapped(trainer.optimizer).register_step_pre_hook(hook).remove)
        try:
            yield
        finally:
            active = False


@contextmanager
def extended_log(trainer: Any, metrics: Callable[[], dict[str, float]]) -> Iterator[None]:
    """Adds the entries of `metrics()` that have changed to each training row and the last row.

    A callback could not do this, because the callbacks of trackers run before the user's callbacks.
    """
    original, changed = trainer.log, ChangedMetrics(metrics)

    @functools.wraps(original)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        of_training = "loss" in logs or "train_loss" in logs
        original({**logs, **changed()} if of_training else logs, *args, **kwargs)

    with replaced(trainer, "log", log):
        yield


def loss_fn_of(trainer: Any) -> Callable[[Any], Any] | None:
    """The trainer's own `compute_loss` of one batch, or None if its losses cannot be compared.

    Trainers that override `_prepare_inputs` (GRPO, RLOO) train on completions that the current
    weights generate. The loss of such a batch does not measure the model: advantages have mean
    zero, so the loss is about 0 for any weights.
    """
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        return None

    def loss_of(batch: Any) -> Any:
        # compute_loss may change its inputs, and in TRL the metrics of the next log.
        inputs = copied(batch)
        counts = LossCounts(trainer)
        try:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))
        finally:
            counts.restore()

    return loss_of
