"""`stop_clipping`: the Trainer measures the gradient norm, and the policy clips."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from healcore.torch.attachment import unwrapped
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer
from healcore.torch.trainers.patching import patched


def stop_clipping(trainer: HfTrainer, limit: float | None, stack: ExitStack) -> None:
    """Makes the Trainer measure the gradient norm for its log without clipping the gradients.

    The Trainer clips before the optimizer's step is judged: a norm of 700 would be judged as 1.0.
    With a `limit` the gradients are clipped afterwards. If the policy changes nothing, the result
    is bit-identical to the Trainer's own clipping, because the parameters are in the model's order.
    Without a `limit` the policy enforces the Trainer's limit, or there is none. `max_grad_norm` of
    the Trainer's arguments stays, because every checkpoint saves it and trackers read it.

    Args:
        trainer: the Trainer, with its optimizer.
        limit: max L2 norm of the gradients, or None.
        stack: closed when the training ends. The Trainer then clips as before.
    """
    active = [True]  # other code may keep a reference to `measure_only` after the training
    stack.callback(active.clear)

    def without_limit(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measure_only(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if active:
                max_norm = math.inf
            return function(parameters, max_norm, *args, **kwargs)

        return measure_only

    def clip(*_: Any) -> None:
        assert limit is not None
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), limit)

    for owner, name, function in internals.clipping_functions(trainer):
        stack.enter_context(patched(owner, name, without_limit(function)))
    if limit is not None:
        hook: Any = torch.compiler.disable(clip)
        stack.callback(unwrapped(trainer.optimizer).register_step_pre_hook(hook).remove)
