"""Recovers the loss of a training step from what Lightning passes to `on_before_backward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Losses:
    """Hands the losses of backward passes on to the optimizers that they belong to.

    With several optimizers (manual optimization) the losses since the last step belong to the
    optimizer that steps next: a GAN's generator is not judged by the discriminator's loss.

    Args:
        trainer: Lightning's.
        observe: receives a loss, and the optimizer if there are several.
    """

    def __init__(self, trainer: Any, observe: Callable[[Tensor, Optimizer | None], object]) -> None:
        self._trainer = trainer
        self._observe = observe
        self._several = len(trainer.optimizers) > 1
        self._waiting: list[Tensor] = []

    def before_backward(self, passed: Tensor) -> None:
        """Takes what Lightning is about to call `backward` on. No sync."""
        loss = self._unscaled(passed)
        if self._several:
            self._waiting.append(loss.detach())
        else:
            self._observe(loss, None)

    def before_step(self, optimizer: Optimizer) -> None:
        """Takes the optimizer that is about to step; its gradients are complete."""
        waiting, self._waiting = self._waiting, []
        for loss in waiting:
            self._observe(loss, optimizer)

    def _unscaled(self, passed: Tensor) -> Tensor:
        """The loss as `training_step` returned it.

        Lightning has divided it by `accumulate_grad_batches` (only in automatic optimization), and
        multiplied it by the scale of a GradScaler, which stays on the device here.
        """
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        parts = self._trainer.accumulate_grad_batches
        if scaler is not None:
            passed = passed.detach()
            passed = passed / scaler.scale(torch.ones((), device=passed.device))
        return passed if parts == 1 else passed.detach() * parts
