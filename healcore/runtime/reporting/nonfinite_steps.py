"""When a run ends that has no finite step, and the texts about steps that are not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

from healcore.core.decision import Cause
from healcore.core.step_record import StepRecord, Why

FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""


def nonfinite_streak_text(
    record: StepRecord, steps: int, weights: Sequence[str], from_start: bool
) -> str:
    """Describes many consecutive steps that were not finite.

    Args:
        record: the record of the last such step.
        steps: number of such steps.
        weights: names of the parameters with NaN or Inf, in their order. A skip changes no
            parameter, so a run without a finite step has the parameters that it was started with.
        from_start: whether the run has had no finite step at all.

    Returns:
        A clause with the most likely reason: the weights, the training step, the optimizer, the
        gradient or the loss.
    """
    which, since, loaded = "last", "", ""
    if from_start:
        which, since, loaded = "first", " since the start", "loaded "
    text = f"none of the {which} {steps:,} steps was finite, so nothing was trained"
    if weights:
        return f"{text}: the {loaded}weights are NaN or Inf; the first tensor is {weights[0]}"
    if record.why == Why.STATE_KEPT:
        return f"{text}: the training step has kept its old state{since}"
    if record.by_optimizer:
        return f"{text}: the gradients were finite, and the optimizer made NaN or Inf of them"
    signal = "gradient"
    if record.cause & Cause.NONFINITE_LOSS:
        signal = "loss"
    text += f": the {signal} is NaN or Inf{since}"
    for tensor in record.evidence:
        if not math.isfinite(tensor.grad_norm):
            return f"{text}; the first tensor is the gradient of {tensor.name}"
    return text
