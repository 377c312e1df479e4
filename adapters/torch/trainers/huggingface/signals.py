"""Lets a policy see a Trainer's unclipped gradient norms and the true loss of each step.

Each context manager changes one Trainer for its block, and nothing in the Trainer's arguments,
which are saved with every checkpoint and read by the trackers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.runtime.incidents.run_metrics import ChangedMetrics
from healcore.torch.trainers import replaced
from healcore.torch.trainers.huggingface.progress import LossCounts


def max_grad_norm(trainer: Any) -> float | None:
    """The limit that the Trainer clips at (TrainingArguments.max_grad_norm), or None."""
    limit = trainer.args.max_grad_norm
    return float(limit) if limit is not None and limit > 0 else None


@contextmanager
def unclipped(trainer: Any) -> Iterator[None]:
    """The Trainer measures the norm of the gradients, for its log, and does not clip them.

    It would clip before the optimizer's step hooks: a norm of 700 would be judged as 1.0. The
    policy or `clipped_after` has to enforce the limit instead.
    """
    active = True  # other code may wrap `measure_only` and keep it: it clips again afterwards

    def measures(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measure_only(of: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            return function(of, math.inf if active else max_norm, *args, **kwargs)

        return measure_only

    accelerator = trainer.accelerator
    with ExitStack() as stack:
        measure = measures(accelerator.clip_grad_norm_)
        stack.enter_context(replaced(accelerator, "clip_grad_norm_", measure))
        # Parameters on several device meshes: the Trainer has a function of its own for them.
        of_meshes = getattr(trainer, "_mixed_mesh_grad_norm", None)
        if of_meshes is not None:
            stack.enter_context(replaced(trainer, "_mixed_mesh_grad_norm", measures(of_meshes)))
        try:
            yield
        finally:
            active = False


@contextmanager
def clipped_after(trainer: Any, optimizer: Optimizer, limit: float) -> Iterator[None]:
    """Clips the global norm to `limit` at each step, after hooks that were registered before.

    The result has the same bits as the Trainer's own clipping where those hooks changed nothing:
    the order of the parameters is the model's. `optimizer` is the torch optimizer, not accelerate's
    wrapper.
    """

    def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), limit)

    hook: Any = torch.compiler.disable(clip)
    handle = optimizer.register_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def observed_losses(trainer: Any, observe: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls `observe` after each micro-batch, so that their mean is the loss of the step.

    It is the loss whose gradients the step applies: before the Trainer filters NaN, averages over
    its logging steps and rounds. `training_step` returns a loss that is divided by the number of
    micro-batches, or by the items of all of them (tokens of a causal language model). In both cases
    the step's loss is their sum, so each is multiplied by the number of micro-batches. No host
    sync.
    """
    original = trainer.training_step

    @functools.wraps(original)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        micro_batches = trainer.current_gradient_accumulation_steps
        observe(loss if micro_batches == 1 else loss * micro_batches)
        return loss

    with replaced(trainer, "training_step", training_step):
        yield


@contextmanager
def extended_log(trainer: Any, metrics: Callable[[], dict[str, float]]) -> Iterator[None]:
    """Adds the entries of `metrics()` that have changed to each training row of the log.

    It does so before any callback sees the row: the trackers' callbacks come before the user's.
    """
    original, changed = trainer.log, ChangedMetrics(metrics)

    @functools.wraps(original)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        original({**logs, **changed()} if "loss" in logs else logs, *args, **kwargs)

    with replaced(trainer, "log", log):
        yield


def loss_fn_of(trainer: Any) -> Callable[[Any], Any] | None:
    """The trainer's own `compute_loss` of one batch, or None if its losses cannot be compared.

    Trainers that override `_prepare_inputs` (GRPO, RLOO) train on completions that the current
    weights generate. The loss of such a batch does not measure the model: its advantages have mean
    zero, so it is about 0 for any weights that generated it.
    """
    from transformers import Trainer

    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        return None

    def loss_of(batch: Any) -> Any:
        # TRL's compute_loss changes its inputs, and adds to the metrics that are logged next.
        inputs = dict(batch) if isinstance(batch, Mapping) else batch
        before = LossCounts(trainer)
        try:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))
        finally:
            before.restore()

    return loss_of
