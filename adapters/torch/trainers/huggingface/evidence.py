"""Makes the Healer's `loss_fn` of the trainer's own `compute_loss`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healcore.torch.trainers.huggingface.counts import LossCounts


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
        before = LossCounts(trainer)
        try:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model, trainer._prepare_inputs(inputs))
        finally:
            before.restore()

    return loss_of
