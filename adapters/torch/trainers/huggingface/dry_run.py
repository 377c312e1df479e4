"""Trains a copy of a trainer for a few steps, to show how a policy would respond."""

from __future__ import annotations

import copy
import inspect
import json
import math
import tempfile
import types
from collections import deque
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
from healcore.core.errors import AttachError
from healcore.policy import Policy, load
from healcore.runtime.data.random_states import isolated
from healcore.runtime.faults.array_errors import INDICES
from healcore.runtime.faults.failures import classify
from healcore.runtime.run_options import Logging
from healcore.torch.attachment import unwrapped


class DryRun(NamedTuple):
    """The result of a dry run."""

    losses: tuple[float, ...]
    """The loss of each step."""
    grad_norms: tuple[float, ...]
    """The gradient norm of each step, before clipping."""
    finite: bool
    """Whether all losses and norms are finite."""
    would: tuple[tuple[str, ...], ...]
    """Names of the policy's causes and actions at each step, without clipping."""


def train_copy(trainer: Any, steps: int, policy: Any, callback: Callable[..., Any]) -> DryRun:
    """Trains a copy for `steps` steps under the policy in observe mode.

    Model and optimizer are copied; the dataset is shared. At the end the random states are restored
    and accelerate's gradient state, which the whole process shares.

    Args:
        trainer: the Trainer.
        steps: number of optimizer steps.
        policy: a Policy or an Engine.
        callback: `HealingCallback`.

    Raises:
        AttachError: the trainer uses vLLM.
        Exception: an exception of the training, with a diagnosis as its note.
    """
    if getattr(trainer, "use_vllm", False):
        raise AttachError(
            "dry_run trains a copy, and vLLM generates with the weights of the trainer itself: "
            "call it on a trainer with use_vllm=False"
        )
    if isinstance(policy, Policy):
        policy = load(policy, mode="observe")
    else:
        policy = policy.config._replace(mode="observe")
    shared = trainer.accelerator.gradient_state.__dict__
    gradient_state = {**shared}
    try:
        with isolated(), tempfile.TemporaryDirectory(prefix="healcore-dry-run-") as folder:
            metrics = Path(folder, "metrics.jsonl")
            copied = _copy(trainer, steps, folder)
            copied.add_callback(callback(policy, logging=Logging(metrics=metrics)))
            copied.train()
            return _read_metrics(metrics)
    except Exception as error:
        _add_hint(error)
        raise
    finally:
        shared.clear()
        shared.update(gradient_state)


def _add_hint(error: Exception) -> None:
    fault, hint = classify(error), ""
    if fault.cause is not Cause.UNKNOWN:
        hint = fault.advice
    elif isinstance(error, IndexError):
        hint = INDICES
    elif isinstance(error, KeyError):
        hint = "The batch lacks this key: compare the dataset's columns with the model's arguments."
    if hint:
        error.add_note(f"healcore: {hint}")


def _read_metrics(metrics: Path) -> DryRun:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row["kind"] == "step"]
    losses = tuple(float(row.get("loss", "nan")) for row in rows)
    norms = tuple(float(row.get("grad_norm", "nan")) for row in rows)
    finite = bool(rows) and all(map(math.isfinite, losses + norms))
    would = tuple((*row.get("cause", ()), *row.get("action", ())) for row in rows)
    return DryRun(losses, norms, finite, would)


def _copy(trainer: Any, steps: int, folder: str) -> Any:
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
    new._created_lr_scheduler = False
    new.accelerator = copy.copy(trainer.accelerator)
    for name in ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"):
        setattr(new.accelerator, name, [])
    new.accelerator.scaler = copy.deepcopy(getattr(trainer.accelerator, "scaler", None))
    new.state, new.control = TrainerState(), TrainerControl()
    new.callback_handler = CallbackHandler(
        [DefaultFlowCallback()], new.model, trainer.processing_class, None, None
    )
    new._memory_tracker = copy.copy(trainer._memory_tracker)
    # TRL's trainers collect metrics between two logs in these attributes.
    for name, value in vars(trainer).items():
        if name.startswith("_") and isinstance(value, (dict, deque)):
            setattr(new, name, copy.deepcopy(value))
    return new


def _rebind(new: Any, trainer: Any) -> None:
    """Binds methods that were set on the trainer object to the copy, without their wrappers.

    A wrapper refers to the original trainer: called on the copy, it would train the original.
    """
    for name, value in list(vars(new).items()):
        method = inspect.unwrap(value) if callable(value) else None
        if getattr(method, "__self__", None) is trainer:
            delattr(new, name)
            if method is value:
                setattr(new, name, types.MethodType(value.__func__, new))


def _copy_optimizer(trainer: Any, model: torch.nn.Module) -> Optimizer | None:
    """An optimizer of the same class for the copy, or None if the Trainer creates its optimizer.

    A deep copy would step the original, because a learning-rate scheduler replaces
    `optimizer.step` by a wrapper of the original's method.
    """
    if trainer.optimizer is None:
        return None
    original = unwrapped(trainer.optimizer)
    pairs = zip(trainer.model.parameters(), model.parameters(), strict=True)
    copies = {id(old): new for old, new in pairs}
    groups = [
        {**group, "params": [copies[id(p)] for p in group["params"]]}
        for group in original.param_groups
    ]
    kind: Any = type(original)
    new = kind(groups)
    new.load_state_dict(copy.deepcopy(original.state_dict()))
    return new
