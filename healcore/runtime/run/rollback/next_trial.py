"""What is tried next where earlier weights are better: a pure function of what was tried.

A rollback that changes nothing is harmless by construction: the run repeats its own steps. Whatever
it changes is a trial. If the trouble comes back after all trials, they are undone: the program
itself causes the trouble, for example by a learning rate that it raises on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from healcore.runtime.run.healthy_ranges import RATE_TOLERANCE

MAX_HOLDS = 2
"""Trials that hold what is unusual, for one trouble. The second one also withholds the updates of
the steps around the onset: their gradients may be wrong without an unusual norm or batch, as with
flipped signs."""


MAX_ACCEPTED = 3
"""Troubles accepted in a row. After that a verdict is only an alert."""


class Trial(StrEnum):
    """What a run changes when it repeats the steps of a place. Checkpoints hold the values."""

    LIMIT_RATE = "rate"  # the learning rate is limited to the last healthy rate
    REPEAT = "repeat"  # nothing: damage by a bit flip or a faulty device does not come back
    HOLD = "hold"  # what was outside of its healthy range is held in it
    ACCEPT = "accept"  # the trials are undone; no later rollback is for this trouble


class TroubleFacts(NamedTuple):
    """What is known about the trouble that a comparison of weights has found."""

    rates: Sequence[Mapping[str, float]]  # in force at the comparisons that found it, if known
    healthy_rates: Mapping[str, float]  # highest rates at which the run was healthy, if known
    from_start: bool  # whether the better weights are the first of the run
    unusual: bool  # whether anything is unusual at the trouble that no trial has held yet
    may_limit: int  # number of times that the rate may be limited at one place


def next_trial(tried: Sequence[Trial], facts: TroubleFacts) -> Trial:
    """The next trial for a trouble where `tried` has not helped, in this order.

    * Limit the rate if it is above every healthy rate, or if the better weights are the run's
      first.
    * Repeat once with nothing changed.
    * Hold what left its healthy range: numbers of the optimizers, gradient norms, batches whose
      loss the better weights find unusual. Once more with what is newly unusual, and without the
      updates of these steps.
    * Limit a rate that is unknown, because nothing that is known has helped.
    * Undo the trials.
    """
    healthy = facts.healthy_rates
    higher = (
        r > healthy.get(n, 0.0) * RATE_TOLERANCE for rates in facts.rates for n, r in rates.items()
    )
    may_limit = tried.count(Trial.LIMIT_RATE) < facts.may_limit
    if may_limit and (facts.from_start or any(higher)):
        return Trial.LIMIT_RATE
    if not tried:
        return Trial.REPEAT
    if facts.unusual and tried.count(Trial.HOLD) < MAX_HOLDS:
        return Trial.HOLD
    if may_limit and not facts.rates:
        return Trial.LIMIT_RATE
    return Trial.ACCEPT
