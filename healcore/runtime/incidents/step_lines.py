"""Pieces of console lines about unhealthy steps, and which of them are logged."""

from __future__ import annotations

import math
from collections.abc import Sequence

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Cause, names
from healcore.events.schema import flag_names

FROM_START = 100
"""Steps after which a run ends that has had no finite step."""
IN_A_ROW = 1_000
"""Consecutive steps without a finite step after which any other run ends."""


def nonfinite_row_text(
    record: StepRecord, row: int, weights: Sequence[str], from_start: bool
) -> str:
    """The sentence about a run of which `row` consecutive steps were not finite.

    `weights` has the names of the parameters with NaN or Inf, in their order. A skip changes no
    parameter, so a run without a finite step has the parameters that it was started with.
    """
    which = "first" if from_start else "last"
    text = f"none of the {which} {row:,} steps was finite, so nothing was trained"
    since = " since the start" if from_start else ""
    if weights:
        loaded = ", because they were loaded so" if from_start else ""
        return (
            f"{text}: the weights are NaN or Inf{since}{loaded}; the first tensor is {weights[0]}"
        )
    if not record.taken:
        return f"{text}: the training step has kept its old state{since}"
    named = [each.name for each in record.evidence if not math.isfinite(each.grad_norm)]
    first = f"; the first tensor is the gradient of {named[0]}" if named else ""
    what = "loss" if record.cause & Cause.NONFINITE_LOSS else "gradient"
    return f"{text}: the {what} is NaN or Inf{since}{first}"


def cause_text(cause: Cause) -> str:
    """Names of causes, as a clause."""
    return flag_names(names(cause))


def is_logged(number: int) -> bool:
    """Whether occurrence `number` has a line: the first ten, then each power of two."""
    return number <= 10 or number & (number - 1) == 0


def passes_power_of_ten(before: int, now: int) -> bool:
    """Whether a count has just reached 1, 10, 100, ..."""
    return now > before and (not before or len(str(now)) > len(str(before)))
