"""Defines `arctic_callbacks`, which heals an ArcticTraining trainer through its own callbacks.

The callbacks use pre-events only: ArcticTraining checks the annotations of a post-event's method.
It requires that the first argument of a callback is called `self`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action
from healcore.torch.healing import Healing
from healcore.torch.trainers.deepspeed.attachment import heal_engine

if TYPE_CHECKING:
    from healcore.policy import Overrides, PolicyLike


def arctic_callbacks(
    policy: PolicyLike = "default", **overrides: Unpack[Overrides]
) -> list[tuple[str, Callable[..., None]]]:
    """Callbacks that heal an ArcticTraining trainer: the policy clips or skips each step.

        class MyTrainer(SFTTrainer):
            name = "mine"
            callbacks = arctic_callbacks("default")

    Between two optimizer steps, the ranks agree on every reason to stop (iteration limits, the kill
    switch, the policy's stop). If the policy orders a rollback, the order is only logged, because
    ArcticTraining's loop cannot roll back. Restart the same command to resume.

    Args:
        policy: as for `attach`.
        **overrides: as for `attach`.

    Returns:
        (event, function) pairs, for the class attribute `callbacks`.
    """

    def heal_before_training(self: Any) -> None:
        run = HealedRun(self, heal_engine(self.model, policy, **overrides))
        self.healcore = run
        for engine in self.checkpoint_engines:
            run.resume(getattr(engine, "resumed", None))

    def position_before_epoch(self: Any) -> None:
        self.healcore.begin_epoch()

    def label_before_checkpoint(self: Any) -> None:
        self.healcore.note_step()

    return [
        ("pre-train", heal_before_training),
        ("pre-epoch", position_before_epoch),
        ("pre-checkpoint", label_before_checkpoint),
    ]


class HealedRun:
    """The state of healcore in one run of a trainer, available as `trainer.healcore`.

    Attributes:
        heal: the handle of the engine's optimizer.
        cursor: epoch, batches of that epoch and micro-steps of the run after the last optimizer
            step; saved with the weights.
    """

    def __init__(self, trainer: Any, heal: Healing) -> None:
        self.heal = heal
        self._trainer = trainer
        self._epoch_start = 0
        self._skip = 0
        self.cursor = {"epoch": trainer.epoch_idx, "batches": 0, "micro_steps": 0}
        self._stops = False
        """Whether the policy has ordered a stop."""
        heal.hooks.incident_log.take = self._take
        self._own_early_exit: Callable[[], bool] = trainer.need_early_exit
        trainer.need_early_exit = self._need_early_exit

    @property
    def between_steps(self) -> bool:
        """Whether no micro-batch has been accumulated since the last optimizer step."""
        model = self._trainer.model
        return model.micro_steps % model.gradient_accumulation_steps() == 0

    def resume(self, record: dict[str, Any] | None) -> None:
        """Loads the `record` of a checkpoint, unless it is None."""
        if record is None:
            return
        self.cursor = dict(record["cursor"])
        self._skip = self.cursor["batches"]
        self._trainer.model.micro_steps = self.cursor["micro_steps"]
        self.heal.load_state_dict(record["policy"])

    def record(self) -> dict[str, Any]:
        """Returns the state to save with the weights, in the same file."""
        return {"cursor": dict(self.cursor), "policy": self.heal.state_dict()}

    def begin_epoch(self) -> None:
        """Skips the batches that were used before a resume."""
        trainer, skip, self._skip = self._trainer, self._skip, 0
        if skip:
            trainer.train_dataloader = SkipFirstBatches(trainer.train_dataloader, skip)
            trainer.train_batch_idx = self.cursor["micro_steps"]
        self._epoch_start = trainer.train_batch_idx - skip

    def note_step(self) -> None:
        """Sets the trainer's counts and the cursor to the step of the weights, before a save."""
        trainer = self._trainer
        step, micro_steps = trainer.model.global_steps, trainer.model.micro_steps
        trainer.global_step = step
        trainer.global_step_this_run = step - trainer.global_step_at_start_this_run
        if self.between_steps and micro_steps != self.cursor["micro_steps"]:
            batches, epoch = trainer.train_batch_idx - self._epoch_start, trainer.epoch_idx
            self.cursor = {"epoch": epoch, "batches": batches, "micro_steps": micro_steps}

    def is_healthy(self) -> bool:
        """Whether all weights are finite and no incident is open, on every rank. One sync."""
        self.heal.judge_dropped()
        params = self._trainer.model.module.parameters()
        finite = all(bool(p.isfinite().all()) for p in params)
        incident = self.heal.live_engine.pending_record()().incident_open
        return not self._any_rank(not finite or incident)

    def _need_early_exit(self) -> bool:
        """Whether the trainer or the policy of any rank has a reason to stop."""
        trainer = self._trainer
        if not self.between_steps:
            return False  # the micro-batches of this step would be lost
        stop = self._own_early_exit()
        if self._stops and not stop:
            trainer.early_stop_reason, stop = "stopped by healcore's policy", True
        agreed = self._any_rank(stop)
        if agreed and not stop:
            trainer.early_stop_reason = "another rank has a reason to stop"
        return agreed

    def _take(self, record: StepRecord, action: Action) -> Action:
        """Keeps an order to stop. Returns the orders that are not carried out."""
        self._stops |= bool(action & Action.STOP)
        return action & ~Action.STOP

    def _any_rank(self, flag: bool) -> bool:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return flag
        flags = torch.tensor(float(flag), device=self._trainer.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags)


class SkipFirstBatches:
    """A loader whose first pass skips its first `skip` batches. Later passes are complete."""

    def __init__(self, loader: Any, skip: int) -> None:
        self._loader = loader
        self._skip = skip

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        return islice(iter(self._loader), skip, None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
