"""Decides what a run tries after a verdict: a pure function of the facts and of earlier trials.

A rollback that changes nothing is harmless by construction: the run repeats its own steps. A change
of the rate, the data or a number of the optimizer is a trial. If the trouble comes back after all
trials, they are undone: the program means what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

MAX_LEFT_OUT = 2
"""Trials that leave out steps at one place."""
MAX_ACCEPTED = 3
"""Places accepted one after another; then a verdict only alerts."""
ABOVE = 1.0001
"""A rate is above another from this ratio on: two float32 computations of one rate differ less."""


class Trial(StrEnum):
    """What a run changes when it repeats the steps of a place."""

    RATE = "rate"
    """The learning rate is limited to the last healthy rate."""
    REPEAT = "repeat"
    """Nothing: damage by a bit flip or a faulty device does not come back."""
    LEAVE_OUT = "leave_out"
    """The unusual steps at the onset are left out."""
    NUMBERS = "numbers"
    """Unusual other numbers of the optimizer are replaced by their last healthy values."""
    ACCEPT = "accept"
    """What was tried is undone, and the trouble is never rolled back again."""


class Facts(NamedTuple):
    """What is known about the trouble."""

    rates: Sequence[float]
    """Learning rates in force at the comparisons that found it; empty if unknown."""
    healthy_rate: float
    """Highest rate at which the run was healthy; 0 if unknown."""
    from_start: bool
    """Whether the better weights are the first of the run."""
    unusual: bool
    """Whether a step at the onset is unusual: its batch for the better weights, or its norm."""
    numbers: bool
    """Whether a number of the optimizer had a value that it had at no healthy checkpoint."""
    may_limit: int
    """Number of times that the rate may be limited at one place."""
    can_rewind: bool
    """Whether the data can be rewound."""


def decide(tried: Sequence[Trial], facts: Facts) -> Trial:
    """The next trial at a place where `tried` has not helped, in this order.

    * The rate is above every healthy rate, or the better weights are the first of the run: limit
      it. An unknown rate is limited after a repeat that has not helped.
    * Repeat once with nothing changed.
    * Leave out what is unusual at the onset, at most `MAX_LEFT_OUT` times.
    * Hold unusual numbers of the optimizer at their last healthy value, once, unless the better
      weights are the first of the run: a schedule has shown no range by then.
    * Undo what was tried, and accept.
    """
    raised = max(facts.rates) > facts.healthy_rate * ABOVE if facts.rates else bool(tried)
    if (raised or facts.from_start) and tried.count(Trial.RATE) < facts.may_limit:
        return Trial.RATE
    if not tried:
        return Trial.REPEAT
    if facts.unusual and facts.can_rewind and tried.count(Trial.LEAVE_OUT) < MAX_LEFT_OUT:
        return Trial.LEAVE_OUT
    if facts.numbers and not facts.from_start and Trial.NUMBERS not in tried:
        return Trial.NUMBERS
    return Trial.ACCEPT
