"""One step of DeepSpeed, which may call its optimizer several times, once, or not at all."""

from __future__ import annotations

import math
from typing import Any

import torch

from healcore.torch import gradients
from healcore.torch.healed_step import HealedStep
from healcore.torch.live_engine import EnforcedDecision
from healcore.torch.measurement import (
    MAX_OVERFLOWS,
    DroppedSteps,
    Measurement,
    Measurer,
    Overflows,
)


class DeepSpeedMeasurer(Measurer):
    """Measures a step of DeepSpeed. With ZeRO the norm is over all groups and ranks.

    With ZeRO a rank's optimizer has only a piece of each group, and is called once for each group.
    No call sees all gradients of the step, so the measurer takes DeepSpeed's own norm.

    Args:
        engine: the DeepSpeed engine.
        *args: arguments of `Measurer`.
    """

    may_clip_as_torch = False  # DeepSpeed clips by arithmetic of its own

    def __init__(self, engine: Any, *args: Any) -> None:
        super().__init__(*args)
        self._deepspeed = engine
        self._sharded = is_sharded(engine)
        self.dropped = SkippedByDeepSpeed(engine)
        # Overflows are normal under a dynamic loss scale. Otherwise the gradients are not finite.
        owner = getattr(engine.optimizer, "loss_scale_config", None) or engine.optimizer
        is_dynamic = getattr(owner, "dynamic_loss_scale", False)
        self.overflows = Overflows(self.home, MAX_OVERFLOWS if is_dynamic else 0)

    def measure(self, *args: Any, **kwargs: Any) -> Measurement:
        """Measures a step as `Measurer.measure` does, with DeepSpeed's norm under ZeRO.

        Args:
            *args: as for `Measurer.measure`.
            **kwargs: as for `Measurer.measure`.

        Returns:
            What this rank measures; `grad_norm` is NaN if DeepSpeed found the norm not finite.
        """
        measured = super().measure(*args, **kwargs)
        if not self._sharded:
            return measured
        # Reduced over the ranks, without the loss scale, before clipping. The norm that the engine
        # returns is one step behind.
        norm = self._deepspeed.optimizer._global_grad_norm
        norm = torch.as_tensor(norm, dtype=torch.float32)
        norm = gradients.to_device(norm, self.home)
        norm = norm.masked_fill(norm < 0, math.nan)  # DeepSpeed sets -1 if it is not finite
        return measured._replace(signals=measured.signals._replace(grad_norm=norm))


class SkippedByDeepSpeed(DroppedSteps):
    """Detects that DeepSpeed skipped a step after an overflow, without calling the optimizer.

    The hook of the optimizer does not run in such a step. Without this check, the policy would
    never judge the step.

    Args:
        engine: the DeepSpeed engine, which counts its skipped steps.

    Attributes:
        stepped: see `DroppedSteps`.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._skipped = engine.skipped_steps
        self.stepped = False

    def take(self) -> bool:
        """Whether a step was skipped since the last call.

        A rollback lowers DeepSpeed's count, which does not mean a skipped step.
        """
        before = self._skipped
        self._skipped = self._engine.skipped_steps
        return self._skipped > before


class DeepSpeedStep(HealedStep):
    """Judges once per step of DeepSpeed, and enforces the decision in every parameter group.

    Args:
        engine: the DeepSpeed engine.
        adopted_limit: DeepSpeed's max gradient norm, which the policy enforces instead, or None.
        *args: arguments of `HealedStep`.
    """

    may_reset_moments = False  # DeepSpeed refers to the moment tensors

    def __init__(self, engine: Any, adopted_limit: float | None, *args: Any) -> None:
        super().__init__(*args)
        self.adopted_limit = adopted_limit
        self._first = gradients.parameters(self.optimizer)[0]
        self._group_decision: EnforcedDecision | None = None
        self._sharded = is_sharded(engine)

    @torch.no_grad()
    def _judge(self) -> None:
        """Judges the first group of a step, and enforces the same decision in the other groups.

        With ZeRO DeepSpeed calls the optimizer once for each group, with only this group in it.
        """
        params = gradients.parameters(self.optimizer)
        if not self._sharded or params[0] is self._first:
            super()._judge()
            self._group_decision = self._enforced
        elif self._group_decision is not None:
            self._apply(params, self._group_decision, self._amp_flag("grad_scale"))

    def _report(self, measured: Measurement) -> None:
        """See `HealedStep._report`."""
        if self._sharded:  # a norm of a flat piece belongs to no single parameter
            measured = Measurement()
        super()._report(measured)


def is_sharded(engine: Any) -> bool:
    """Whether each rank's optimizer holds flat pieces of all parameters (ZeRO-1, ZeRO-2, BF16)."""
    return hasattr(engine.optimizer, "partition_count")
