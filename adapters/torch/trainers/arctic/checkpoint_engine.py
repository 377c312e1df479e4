"""Defines `ArcticCheckpointEngine`, whose DeepSpeed checkpoints can be resumed from exactly.

The checkpoint engine of ArcticTraining 0.8 labels a checkpoint one step too low, and may save
within an accumulation. It estimates the position in the data from the step, and saves NaN weights.
"""

from __future__ import annotations

from typing import Any

from arctic_training.checkpoint.ds_engine import (  # pyright: ignore[reportMissingImports]
    DSCheckpointEngine,
)
from arctic_training.logging import logger  # pyright: ignore[reportMissingImports]

from healcore.torch.trainers import replaced


class ArcticCheckpointEngine(DSCheckpointEngine):
    """A checkpoint engine for trainers with `arctic_callbacks`.

        class MyTrainer(SFTTrainer):
            name = "mine"
            checkpoint_engine: ArcticCheckpointEngine
            callbacks = arctic_callbacks("default")

    In the recipe: `checkpoint: [{type: healcore, output_dir: ..., save_every_n_steps: 100}]`.
    A checkpoint is saved between two optimizer steps, if the weights are finite and no incident is
    open. One file holds the step of the weights, the position in the data and the policy's state.
    A resume neither repeats nor skips a batch, provided that the loader has the same order in each
    epoch, as ArcticTraining's own loader does.

    Attributes:
        resumed: the `HealedRun.record` of the loaded checkpoint, or None.
    """

    name = "healcore"
    resumed: dict[str, Any] | None = None
    _saved: int | None = None

    @property
    def do_checkpoint(self) -> bool:
        """Whether a checkpoint is due now, and the run is healthy on every rank."""
        trainer, config, run = self.trainer, self.config, self.trainer.healcore
        step = trainer.global_step
        every, epochs = config.save_every_n_steps, config.save_every_n_epochs
        due = bool(every) and run.between_steps and step % every == 0
        due = due or (bool(epochs) and self.epoch_finished and trainer.epoch_idx % epochs == 0)
        due = due or (config.save_end_of_training and self.training_finished)
        if not config.enabled or not due or step == 0 or step == self._saved:
            return False
        if not run.is_healthy():
            logger.warning(
                f"healcore: no checkpoint at step {step}: the weights are not finite, or an "
                "incident is open; the previous checkpoint stays the latest"
            )
            return False
        return True

    @property
    def client_state(self) -> dict[str, Any]:
        """ArcticTraining's own state, plus the position in the data and the policy's state."""
        record = self.trainer.healcore.record()
        epoch = record["cursor"]["epoch"]
        return {**super().client_state, "end_of_epoch": epoch, "healcore": record}

    def save(self, model: Any) -> None:
        """Saves a checkpoint."""
        super().save(model)
        self._saved = self.trainer.global_step

    def load(self, model: Any) -> None:
        """Loads the latest checkpoint, if any."""
        original, client_states = model.load_checkpoint, []

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            loaded = original(*args, **kwargs)
            client_states.append(loaded[1])
            return loaded

        with replaced(model, "load_checkpoint", load_checkpoint):
            super().load(model)
        if not client_states:
            return
        self.resumed = client_states[0].get("healcore")
        self._saved = self.trainer.global_step
        # ArcticTraining estimates the position if `is_resume`. A record has the exact position.
        self.trainer.is_resume = self.resumed is None
