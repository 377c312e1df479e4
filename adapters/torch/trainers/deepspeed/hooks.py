"""Defines the step hooks of an optimizer that DeepSpeed steps.

The engine steps the optimizer that was passed to it, its basic optimizer, within `engine.step()`.
With ZeRO-1 and ZeRO-2 the basic optimizer has one flat piece of each parameter group, this rank's,
and is stepped once for each group: its gradients are not the whole step's.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch

from healcore.torch import gradients
from healcore.torch.engines import HostOrder
from healcore.torch.grad_scaler import SEARCH, DroppedSteps, Overflows
from healcore.torch.measurement import Measurement, Measurer, StepNorms
from healcore.torch.step_hooks import StepHooks


def is_sharded(engine: Any) -> bool:
    """Whether each rank's optimizer has flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")


def dynamic_scale(engine: Any) -> bool:
    """Whether DeepSpeed searches a loss scale, so that overflows are normal."""
    optimizer = engine.optimizer
    config = getattr(optimizer, "loss_scale_config", None)
    return bool(getattr(config or optimizer, "dynamic_loss_scale", False))


class SkippedByDeepSpeed(DroppedSteps):
    """Detects that DeepSpeed skipped a step after an overflow, without calling the optimizer."""

    searches = 0
    scaler = None

    def __init__(self, deepspeed: Any) -> None:
        self._deepspeed = deepspeed
        self._skipped = deepspeed.skipped_steps
        self.stepped = False

    def found(self) -> bool:
        """Whether a step was skipped since the last call."""
        before, self._skipped = self._skipped, self._deepspeed.skipped_steps
        return self._skipped > before  # a rollback lowers it


class EngineMeasurer(Measurer):
    """Measures a step of the engine: with ZeRO by the norm over all groups and ranks."""

    def __init__(self, deepspeed: Any, *args: Any) -> None:
        super().__init__(*args)
        self._deepspeed = deepspeed
        self._sharded = is_sharded(deepspeed)
        self.dropped = SkippedByDeepSpeed(deepspeed)
        # Without a search for the scale an overflow is a non-finite gradient.
        self.overflows = Overflows(self.home, SEARCH if dynamic_scale(deepspeed) else 0)

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """See `Measurer.measure`."""
        measured = super().measure(*args, **kwargs)
        if not self._sharded:
            return measured
        # DeepSpeed computes this norm before the basic optimizer's step: reduced over the ranks,
        # without the loss scale, before clipping. get_global_grad_norm() is a step behind.
        norm = self._deepspeed.optimizer._global_grad_norm
        norm = torch.as_tensor(norm, dtype=torch.float32).to(self.home, non_blocking=True)
        # -1 stands for a norm that is not finite.
        return measured._replace(grad_norm=norm.masked_fill(norm < 0, math.nan))


class EngineHooks(StepHooks):
    """Judges once for each step of the engine, and enforces the decision in every group.

    Args:
        deepspeed: the engine.
        taken_over: DeepSpeed's own `gradient_clipping`, which is switched off there, or None.
        limit: the same if it is enforced after the policy; 0 if the policy's clipping holds it.
        *args: of `StepHooks`.

    Attributes:
        changes: what is changed on the engine until the hooks are removed.
    """

    def __init__(self, deepspeed: Any, taken_over: float | None, limit: float, *args: Any) -> None:
        super().__init__(*args)
        self.taken_over = taken_over
        self.changes = ExitStack()
        self._limit = limit
        self._first = gradients.parameters(self.optimizer)[0]
        self._group_order: HostOrder | None = None
        self._sharded = is_sharded(deepspeed)
        # DeepSpeed keeps references to the moments.
        self._resets_moments = self.incident_log.resets_moments = False

    def limited(self, order: HostOrder, measured: Measurement) -> HostOrder:
        """The order with DeepSpeed's own limit on top."""
        norm = float(self.live_engine.state.last.grad_norm) if self._limit else 0.0
        if order.skip or not norm * order.grad_scale > self._limit:
            return order
        return order._replace(grad_scale=self._limit / (norm + 1e-6))

    def detach(self) -> None:
        """See `Healing.detach`."""
        super().detach()
        self.changes.close()

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
        # Norms of flat pieces name no parameter.
        super()._report(StepNorms([], [], None) if self._sharded else norms)
