"""Defines the step hooks of an optimizer that DeepSpeed steps.

The basic optimizer is the torch optimizer that `engine.step()` steps. With ZeRO-1 and ZeRO-2 it
holds only this rank's flat piece of each parameter group, and DeepSpeed steps it once per group.
Its gradients in one call are therefore only a part of the step's gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from healcore.core.signals import Signals
from healcore.torch import gradients
from healcore.torch.engines import Order
from healcore.torch.healed_step import HealedStep
from healcore.torch.measurement import SEARCH, DroppedSteps, Measurer, Overflows, StepNorms


def is_sharded(engine: Any) -> bool:
    """Whether each rank's optimizer holds flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")


def searches_scale(engine: Any) -> bool:
    """Whether DeepSpeed uses a dynamic loss scale, so that overflows are normal."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    return bool(getattr(config or optimizer, "dynamic_loss_scale", False))


class SkippedByDeepSpeed(DroppedSteps):
    """Detects that DeepSpeed skipped a step after an overflow, without calling the optimizer."""

    def __init__(self, deepspeed: Any) -> None:
        self._deepspeed = deepspeed
        self._skipped = deepspeed.skipped_steps
        self.stepped = False

    def found(self) -> bool:
        """Whether a step was skipped since the last call."""
        before, self._skipped = self._skipped, self._deepspeed.skipped_steps
        return self._skipped > before  # a rollback lowers it


class EngineMeasurer(Measurer):
    """Measures a step of the engine. With ZeRO the norm is over all groups and ranks."""

    def __init__(self, deepspeed: Any, *args: Any) -> None:
        super().__init__(*args)
        self._deepspeed = deepspeed
        self._sharded = is_sharded(deepspeed)
        self.dropped = SkippedByDeepSpeed(deepspeed)
        # With a fixed scale an overflow is a non-finite gradient.
        self.overflows = Overflows(self.home, SEARCH if searches_scale(deepspeed) else 0)

    def measure(self, *args: Any, **kwargs: Any) -> Signals:
        """See `Measurer.measure`."""
        measured = super().measure(*args, **kwargs)
        if not self._sharded:
            return measured
        # DeepSpeed computes this norm before it calls the basic optimizer: reduced over the ranks,
        # without the loss scale, before clipping. get_global_grad_norm() is one step behind.
        norm = self._deepspeed.optimizer._global_grad_norm
        norm = torch.as_tensor(norm, dtype=torch.float32).to(self.home, non_blocking=True)
        # DeepSpeed sets -1 if the norm is not finite.
        return measured._replace(grad_norm=norm.masked_fill(norm < 0, math.nan))


class EngineHooks(HealedStep):
    """Judges once per step of the engine, and enforces the decision in every parameter group.

    Args:
        deepspeed: the engine.
        adopted_limit: DeepSpeed's max gradient norm, which the policy enforces instead, or None.
        *args: arguments of `HealedStep`.
    """

    def __init__(self, deepspeed: Any, adopted_limit: float | None, *args: Any) -> None:
        super().__init__(*args)
        self.adopted_limit = adopted_limit
        self._first = gradients.parameters(self.optimizer)[0]
        self._group_order: Order | None = None
        self._sharded = is_sharded(deepspeed)
        # DeepSpeed refers to the moment tensors, so they must not be replaced.
        self._resets_moments = self.incident_log.resets_moments = False

    @torch.no_grad()
    def _judge(self) -> None:
        params = gradients.parameters(self.optimizer)
        if not self._sharded or params[0] is self._first:
            super()._judge()
            self._group_order = self._order
        elif self._group_order is not None:
            self._order = self._group_order
            self.enforcer.enforce(params, self._order, self.enforcer.amp_flags()[0])

    def _report(self, norms: StepNorms) -> None:
        # A norm of a flat piece belongs to no single parameter.
        super()._report(StepNorms([], [], None) if self._sharded else norms)
