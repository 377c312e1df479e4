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


def by_optimizer_text(rate: float | None) -> str:
    """Explains a step whose gradients were finite, and whose update was not.

    Args:
        rate: the learning rate, which is named if it is not finite.

    Returns:
        The diagnosis for a person.
    """
    text = "the optimizer made NaN or Inf of a finite gradient"
    if rate is not None and not math.isfinite(rate):
        text += f": the learning rate is {rate}"
    return (
        f"{text}. Look at its learning rate and schedule, and at its numbers in a small dtype: in "
        "bfloat16 a b2 of 0.999 is 1, in float16 an eps of 1e-8 is 0 "
        "(optax.inject_hyperparams takes hyperparam_dtype=jnp.float32)."
    )


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
            text += f"; the first tensor is the gradient of {tensor.name}"
            break
    return text + likely_cause_text(record)


def likely_cause_text(record: StepRecord | None) -> str:
    """Says where to look first after many steps whose loss was NaN or Inf.

    Args:
        record: the newest step that was not finite, or None without such a step.

    Returns:
        A clause that begins with a semicolon, or an empty string if the loss was finite.
    """
    if record is None or not record.cause & Cause.NONFINITE_LOSS:
        return ""
    return (
        "; look first for NaN or Inf in the inputs and labels, then for a division by 0 or a log "
        "of 0 in the loss"
    )
