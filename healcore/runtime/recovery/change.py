"""What a run changes when it repeats the steps of a damage: nothing, the learning rate or the data.

A pure function of the comparison and of the earlier rollbacks for the same trouble.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from healcore.runtime.dominance.dominance import Verdict
from healcore.runtime.recovery.rollback import Rollback


class Change(NamedTuple):
    """What is changed; at most one of the two."""

    lr_at_fault: float | None = None
    """Learning rate that has caused the trouble, NaN if it is unknown, or None if no rate has."""
    skip: tuple[int, int] | None = None
    """First and last step whose batches are skipped, or None if no batch is."""


def change(
    verdict: Verdict,
    past: Sequence[Rollback],
    *,
    factor: float,
    first_step: int,
    may_limit: bool,
    can_rewind: bool,
) -> Change:
    """Returns the first of these changes that applies.

    * The earlier weights find the batches of the trouble unusual: the run skips these batches.
    * The earlier weights are the first of the run, or the learning rate is far above the rate at
      the earlier weights: the rate is at fault.
    * The trouble is new: nothing, because damage may have no cause in the run.
    * Nothing has been changed for it yet: the rate, if it is unknown or above the rate at the
      earlier weights, otherwise the data. The run skips all batches since the earlier weights, and
      at the end of the data all that are left.
    * One of the two has been changed: the other one.

    Args:
        verdict: of the comparison.
        past: earlier rollbacks for the same trouble, the newest last.
        factor: a rate above 1/factor of the healthy rate is at fault.
        first_step: step of the run's first weights.
        may_limit: whether the learning rate may be limited; otherwise it is never at fault.
        can_rewind: whether batches can be skipped.
    """
    if not verdict.data_ordinary:
        return Change(skip=(verdict.onset, verdict.found))
    healthy = verdict.healthy_rate
    first, highest = next(iter(verdict.rates), math.nan), max(verdict.rates, default=math.nan)
    if may_limit:
        if verdict.anchor <= first_step:
            return Change(lr_at_fault=first)
        if healthy and highest * factor > healthy:
            return Change(lr_at_fault=highest)
    if not past:
        return Change()
    raised = not healthy or not highest <= healthy
    rate = past[-1].changed == "data" or (not past[-1].changed and raised)
    if may_limit and (rate or not can_rewind):
        return Change(lr_at_fault=first)
    at_end = verdict.index < verdict.due
    return Change(skip=(verdict.anchor, verdict.index if at_end else verdict.found))
