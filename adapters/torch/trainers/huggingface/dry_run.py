"""Trains a copy of a trainer for a few steps, to show how a policy would respond."""

from __future__ import annotations

import copy
import inspect
import json
import math
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from transformers.trainer_callback import (
    CallbackHandler,
    DefaultFlowCallback,
    TrainerControl,
    TrainerState,
)
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from healcore.core.decision import Cause
from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.policy import Policy, load
from healcore.runtime.data.random_states import isolated
from healcore.runtime.faults.classification import classify
from healcore.runtime.run_options import Logging
from healcore.torch.attachment import unwrapped
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer


class DryRun(NamedTuple):
    """The result of a dry run: what the policy saw, and what it would have done.

    Read `would` before a long run. A healthy start has an empty tuple for each step; a policy that
    skips the first steps does not fit the training.

    Attributes:
        losses: the loss of each step; NaN if a step had none.
        grad_norms: the L2 norm of the gradients at each step, before clipping.
        finite: whether all losses and norms are finite. False if no step was taken.
        would: the names of the policy's causes and actions at each step, without clipping.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    finite: bool
    would: tuple[tuple[str, ...], ...]


def train_copy(
    trainer: HfTrainer, steps: int, policy: Policy | Engine, callback: Callable[..., Any]
) -> DryRun:
    """Trains a copy for `steps` steps under the policy in observe mode.

    Model and optimizer are copied; the dataset is shared. At the end the random states are restored
    and accelerate's gradient state, which the whole process shares.

    Args:
        trainer: the Trainer.
        steps: number of optimizer steps.
        policy: a Policy or an Engine.
        callback: `HealingCallback`.

    Returns:
        The losses and norms of the steps, and the decisions of the policy.

    Raises:
        AttachError: the trainer uses vLLM.
        Exception: an exception of the training, with a diagnosis as its note.
    """
    if getattr(trainer, "use_vllm", False):
        raise AttachError(
            "dry_run trains a copy, and vLLM generates with the weights of the trainer itself: "
            "call it on a trainer with use_vllm=False"
        )
    observing: Any
    if isinstance(policy, Policy):
        observing = load(policy, mode="observe")
    else:
        observing = policy.config._replace(mode="observe")
    shared = trainer.accelerator.gradient_state.__dict__
    gradient_state = {**shared}
    try:
        with isolated(), tempfile.TemporaryDirectory(prefix="healcore-dry-run-") as folder:
            metrics = Path(folder, "metrics.jsonl")
            copied = _copy(trainer, steps, folder)
            copied.add_callback(callback(observing, logging=Logging(metrics=metrics)))
            copied.train()
            return _read_metrics(metrics)
    except Exception as error:
        _add_hint(error)
        raise
    finally:
        shared.clear()
        shared.update(gradient_state)


def _add_hint(error: Exception) -> None:
    """Adds a note to an exception of the training that says what to look at, if that is known."""
    fault = classify(error)
    hint = ""
    if fault.cause is not Cause.UNKNOWN:
        hint = fault.advice
    elif isinstance(error, KeyError):
        hint = "The batch lacks this key: compare the dataset's columns with the model's arguments."
    if hint:
        error.add_note(f"healcore: {hint}")


def _read_metrics(metrics: Path) -> DryRun:
    """The result of a dry run, from the file of metrics that its Healer has written."""
    losses: list[float] = []
    norms: list[float] = []
    would: list[tuple[str, ...]] = []
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        if row["kind"] != "step":
            continue
        losses.append(float(row.get("loss", "nan")))
        norms.append(float(row.get("grad_norm", "nan")))
        would.append((*row.get("cause", ()), *row.get("action", ())))
    finite = bool(would) and all(map(math.isfinite, losses + norms))
    return DryRun(tuple(losses), tuple(norms), finite, tuple(would))


def _copy(trainer: HfTrainer, steps: int, folder: str) -> HfTrainer:
    """A Trainer like the given one, which trains a copy of its model and writes to `folder`."""
    new = copy.copy(trainer)
    _rebind(new, trainer)
    new.args = copy.copy(trainer.args)
    new.args.output_dir = folder
    new.args.max_steps = steps
    new.args.save_strategy = SaveStrategy.NO
    new.args.eval_strategy = new.args.logging_strategy = IntervalStrategy.NO
    new.args.eval_on_start = new.args.load_best_model_at_end = new.args.push_to_hub = False
    new.model = new.model_wrapped = copy.deepcopy(trainer.model)
    new.optimizer = _copy_optimizer(trainer, new.model)
    new.model_init = new.lr_scheduler = None
    new.accelerator = copy.copy(trainer.accelerator)
    new.accelerator.scaler = copy.deepcopy(getattr(trainer.accelerator, "scaler", None))
    new.state, new.control = TrainerState(), TrainerControl()
    new.callback_handler = CallbackHandler(
        [DefaultFlowCallback()], new.model, trainer.processing_class, None, None
    )
    internals.isolate_copy(new, trainer)
    return new


def _rebind(new: HfTrainer, trainer: HfTrainer) -> None:
    """Binds methods that were set on the trainer object to the copy, without their wrappers.

    A wrapper refers to the original trainer: called on the copy, it would train the original.
    """
    for name, value in list(vars(new).items()):
        if not callable(value):
            continue
        method: Any = inspect.unwrap(value)
        if getattr(method, "__self__", None) is trainer:
            delattr(new, name)
            if method is value:
                setattr(new, name, types.MethodType(value.__func__, new))


def _copy_optimizer(trainer: HfTrainer, model: torch.nn.Module) -> Optimizer | None:
    """An optimizer of the same class for the copy, or None if the Trainer creates its optimizer.

    A deep copy would step the original, because a learning-rate scheduler replaces
    `optimizer.step` by a wrapper of the original's method.
    """
    if trainer.optimizer is None:
        return None
    original = unwrapped(trainer.optimizer)
    copies = {}
    for old, copied in zip(trainer.model.parameters(), model.parameters(), strict=True):
        copies[id(old)] = copied
    groups = []
    for group in original.param_groups:
        groups.append({**group, "params": [copies[id(p)] for p in group["params"]]})
    kind: Any = type(original)
    new = kind(groups)
    new.load_state_dict(copy.deepcopy(original.state_dict()))
    return new
