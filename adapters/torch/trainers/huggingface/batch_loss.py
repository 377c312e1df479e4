"""`loss_fn_of`: the loss of one batch by the trainer's own `compute_loss`, to compare weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.counters import CountsBefore
from healcore.torch.trainers.huggingface.trainer_internals import Batch, HfTrainer
from healcore.torch.trainers.patching import patched


def loss_fn_of(trainer: HfTrainer) -> Callable[..., Any] | None:
    """The trainer's own `compute_loss` of one batch, or None if its losses cannot be compared.

    Trainers that override `_prepare_inputs` (GRPO, RLOO), or do not train by `compute_loss` (Online
    DPO), train on completions that the current weights generate. The loss of such a batch does not
    measure the model: advantages have mean zero, so the loss is about 0 for any weights.

    Returns:
        A function of a batch, as the dataloader yields it, and of the number of items that the loss
        is divided by (by default the items of the batch). It changes no count and no log.
    """
    called = inspect.unwrap(type(trainer).training_step).__code__.co_names
    if internals.generates_batches(trainer) or {"compute_loss", "training_step"}.isdisjoint(called):
        return None

    def silent(*_: Any, **__: Any) -> None: ...

    def loss_of(batch: Batch, items: Any = None) -> Any:
        # compute_loss may change its inputs, log, set attributes, and in TRL change metrics.
        inputs = internals.prepared_inputs(trainer, copy.deepcopy(batch))
        items = items or internals.items_in_batch(trainer, inputs)
        given = {}
        if items is not None:
            given["num_items_in_batch"] = items
        counts = CountsBefore(trainer)
        try:
            with patched(trainer, "log", silent), trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, inputs, **given)
        finally:
            counts.restore_in_loss()

    return loss_of
