"""The trainer's own `compute_loss` as the Healer's `loss_fn`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any


def loss_fn_of(trainer: Any) -> Callable[[Any], Any] | None:
    """The loss of one batch of the train dataloader; None if two such losses cannot be compared.

    Trainers that override `_prepare_inputs` (GRPO, RLOO) train on completions that the present
    weights generate. The loss of a batch is then no measure of the model: its advantages have mean
    zero, so it is about 0 for any weights that generated it.
    """
    from transformers import Trainer

    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        return None

    def loss_of(batch: Any) -> Any:
        # TRL's compute_loss changes its inputs, and adds to the metrics that are logged next.
        inputs = dict(batch) if isinstance(batch, Mapping) else batch
        counted = {name: getattr(trainer, name, None) for name in _COUNTED}
        saved = copy.deepcopy(counted)
        try:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))
        finally:
            for name, value in saved.items():
                if value is not None:
                    setattr(trainer, name, value)

    return loss_of


_COUNTED = ("_metrics", "_total_train_tokens")
"""What TRL's trainers add to in `compute_loss`."""
