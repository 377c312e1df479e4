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
"""Trials that hold what is unusual, for one trouble. The second one also freezes the steps
around the onset: their gradients may be wrong without an unusual norm or batch, as with
flipped signs."""


MAX_ACCEPTED = 3
"""Troubles accepted in a row. After that a verdict is only an alert."""


class Trial(StrEnum):
    """What a run changes when it repeats the steps of a place. Checkpoints hold the values.

    `next_trial` says in which order the trials are tried, and how often: each trial costs the
    repeat of some steps.
    """

    LIMIT_RATE = "rate"
    """The learning rate is limited to the last healthy rate."""
    REPEAT = "repeat"
    """Nothing changes. Damage by a bit flip or a faulty device does not come back."""
    HOLD = "hold"
    """What was outside of its healthy range is held in it."""
    ACCEPT = "accept"
    """The trials are undone. No later rollback is for this trouble."""


class TroubleFacts(NamedTuple):
    """What is known about the trouble that a comparison of weights has found.

    `next_trial` decides by these facts alone, so that it can be tested without a run.
    """

    rates: Sequence[Mapping[str, float]]
    """Learning rates in force at the comparisons that found the trouble, each by engine name; empty
    if they are unknown."""
    healthy_rates: Mapping[str, float]
    """Engine name -> highest rate at which the run was healthy, where it is known."""
    from_start: bool
    """Whether the better weights are the first of the run, so that no rate is known as healthy."""
    unusual: bool
    """Whether anything is unusual at the trouble that no trial has held yet."""
    repeats_batches: bool
    """Whether the steps after a rollback repeat their batches. On other batches, damage that comes
    back says less about what was held."""
    max_rate_limits: int
    """Number of times that the policy lets the rate be limited at one place."""

    @property
    def has_higher_rate(self) -> bool:
        """Whether a rate at the trouble was above every healthy rate of its engine.

        A rate without a known healthy rate counts as higher. Rates that differ by less than
        `RATE_TOLERANCE` are equal. If no rate was higher, a limit of the rate would change nothing.
        """
        for rates in self.rates:
            for name, rate in rates.items():
                if rate > self.healthy_rates.get(name, 0.0) * RATE_TOLERANCE:
                    return True
        return False


def next_trial(tried: Sequence[Trial], facts: TroubleFacts) -> Trial:
    """The next trial for a trouble where `tried` has not helped.

    The first of these whose condition holds:

    1. Limit the rate if it is above every healthy rate, or if the better weights are the run's
       first.
    2. Repeat once with nothing changed.
    3. Hold what left its healthy range: numbers of the optimizers, gradient norms, batches whose
       loss the better weights find unusual. A second hold adds what is newly unusual, and
       freezes these steps. It comes also where nothing is newly unusual, if the steps repeat their
       batches: what was held may have been a symptom only.
    4. Limit a rate that is unknown, because nothing that is known has helped.
    5. Undo the trials.

    Args:
        tried: the trials so far for this trouble, oldest first.
        facts: what is known about it.

    Returns:
        The trial. Each call with one more entry in `tried` comes closer to `Trial.ACCEPT`, so a
        trouble has a bounded number of rollbacks: the limits of the rate, one repeat and
        `MAX_HOLDS`.

    Examples:
        >>> facts = TroubleFacts(
        ...     rates=[{"": 0.1}],
        ...     healthy_rates={"": 0.1},
        ...     from_start=False,
        ...     unusual=False,
        ...     repeats_batches=True,
        ...     max_rate_limits=2,
        ... )
        >>> next_trial([], facts)
        <Trial.REPEAT: 'repeat'>
        >>> next_trial([Trial.REPEAT], facts)
        <Trial.ACCEPT: 'accept'>
    """
    limit_left = tried.count(Trial.LIMIT_RATE) < facts.max_rate_limits
    if limit_left and (facts.from_start or facts.has_higher_rate):
        return Trial.LIMIT_RATE
    if not tried:
        return Trial.REPEAT
    may_hold = facts.unusual or (facts.repeats_batches and Trial.HOLD in tried)
    if may_hold and tried.count(Trial.HOLD) < MAX_HOLDS:
        return Trial.HOLD
    if limit_left and not facts.rates:
        return Trial.LIMIT_RATE
    return Trial.ACCEPT
