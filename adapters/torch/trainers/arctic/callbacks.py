"""`arctic_callbacks`: heals an ArcticTraining trainer through its own callbacks.

The callbacks use pre-events only: ArcticTraining checks the annotations of a post-event's method.
It requires that the first argument of a callback is called `self`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Unpack

from healcore.core.errors import AttachError
from healcore.policy import PolicyLike
from healcore.runtime.healer import Healer
from healcore.runtime.run_options import TrainerOptions
from healcore.runtime.store.places import Places
from healcore.torch.trainers.arctic.epochs import HealedEpochs
from healcore.torch.trainers.deepspeed import engine_state
from healcore.torch.trainers.options import resolve_options


def arctic_callbacks(
    policy: PolicyLike = "default",
    *,
    store: Places | Literal["auto"] = "auto",
    **options: Unpack[TrainerOptions],
) -> list[tuple[str, Callable[..., None]]]:
    """Callbacks that heal an ArcticTraining trainer: clip and skip steps, roll back, resume.

        class MyTrainer(SFTTrainer):
            name = "mine"
            callbacks = arctic_callbacks("default")

    While the trainer trains, `trainer.healcore` is its `healcore.Healer`. Between two optimizer
    steps, the ranks agree on ArcticTraining's reasons to stop (iteration limits, the kill switch).
    The same command resumes the run from the store.

    Args:
        policy: as for `healcore.Healer`.
        store: a directory for checkpoints, a list of them, a store, "auto" for `_healcore` in the
            `output_dir` of the recipe's first checkpoint, or None for host memory, which is lost
            with the process.
        **options: further arguments of `healcore.Healer` and values to replace in the policy.

    Returns:
        (event, function) pairs, for the class attribute `callbacks`.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """
    resolved, healer_options = resolve_options(policy, options)

    def heal_before_training(self: Any) -> None:
        if self.global_step:
            raise AttachError(
                "auto_resume of the recipe's checkpoint conflicts with arctic_callbacks, which "
                "continues the run from its own store: set auto_resume to false"
            )
        where: Any = store
        if store == "auto":
            where = _folder_of_recipe(self)
        state = engine_state(self.model)
        state["optimizer"].run_settings = _settings_of(self)
        self.healcore = Healer(resolved, state=state, store=where, **healer_options)
        HealedEpochs(self, self.healcore)  # replaces `train_dataloader`

    def end_before_last_checkpoint(self: Any) -> None:
        # ArcticTraining sets its own count after the save, which is labelled with the count.
        self.train_dataloader.set_counts()
        if self.training_finished:
            self.train_dataloader.close(None)

    return [("pre-train", heal_before_training), ("pre-checkpoint", end_before_last_checkpoint)]


def _folder_of_recipe(trainer: Any) -> Path | None:
    """`_healcore` in the `output_dir` of the recipe's first checkpoint, or None without one."""
    if not trainer.config.checkpoint:
        return None
    return Path(trainer.config.checkpoint[0].output_dir, "_healcore")


def _settings_of(trainer: Any) -> dict[str, int]:
    """The settings that determine the training result, except DeepSpeed's own."""
    config, engine = trainer.config, trainer.model
    return {
        "epochs": config.epochs,
        "train_iters": config.train_iters,
        "per_device_train_batch_size": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }
