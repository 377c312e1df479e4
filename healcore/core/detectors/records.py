"""Records: the loss sets all-time records far more often than an exchangeable stream can.

In an exchangeable stream the t-th loss is a record with probability 1/t, for any unit, scale and
tails of the losses. The score multiplies the likelihood ratios of records with
probability `record_rate` against records with probability 1/t, so that the probability of any alarm
in an endless run is at most `alpha`: docs/detectors.md has the proof.

A loss that rises by design, or data that are not shuffled, set records too. So an alarm is evidence
of damage only where the stream is well mixed.

A loss that is not finite right after a record counts as a record: a model that breaks overflows.
Without a record before it the step counts for nothing. After an alarm the score and the history
start again, so that the new level is accepted, and another alarm needs new evidence.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading

_COUNTED = 1 << 22  # exact as a float32; the bound still holds for 1e12 steps after it


class History(NamedTuple):
    """Extremes of the loss since the start of the history."""

    highest: Any  # float32: the largest loss
    lowest: Any  # float32: the smallest loss
    last: Any  # float32: the last record that counted, at first the first loss


def no_loss() -> History:
    """The history before the first loss."""
    return History(*(np.zeros((), np.float32) for _ in History._fields))


def add_loss(
    history: History, loss: Any, growth: Any, first: Any, learn: Any, *, xp: Any
) -> tuple[History, Any]:
    """Learns a loss, and says whether it is a record.

    A record exceeds all losses before it. It also exceeds the last record by the share `growth` of
    the last record's height above the lowest loss.

    Args:
        history: of the losses before.
        loss: float32, finite.
        growth: the share, at least 0.
        first: bool: the loss begins a history.
        learn: bool: the loss counts; without it the history stays, and there is no record.
        xp: the array namespace.

    Returns:
        The new history, and bool: a record.
    """
    highest, lowest, last = (xp.where(first, loss, each) for each in history)
    margin = numerics.product(growth, last - lowest, xp=xp)
    record = learn & (loss > highest) & (loss > last + margin)
    return History(
        xp.where(learn, numerics.larger(loss, highest, xp=xp), highest),
        xp.where(learn, numerics.smaller(loss, lowest, xp=xp), lowest),
        xp.where(record, loss, last),
    ), record


class RecordsState(NamedTuple):
    """Extremes of the loss since the start or the last alarm, and the score."""

    count: Any  # int32: steps learnt
    history: History
    score: Any  # float32: an alarm at 1 / alpha
    record: Any  # bool: the last step was a record, or not finite after one


class RecordsConfig(NamedTuple):
    """Thresholds of `records`."""

    alpha: Any = 1e-3
    """Largest probability of any alarm in an endless exchangeable run."""
    record_rate: Any = 0.5
    """Probability of a record in the run that the alarm is for."""
    growth: Any = 0.25
    """Share of the last record's height above the lowest loss by which a record exceeds it."""
    warmup_steps: Any = 3
    """Steps learnt before a record counts."""

    CAUSE = Cause.RECORDS
    NEEDS = frozenset({"loss"})

    def init(self) -> RecordsState:
        """No step seen."""
        count, score, record = (np.zeros((), kind) for kind in (np.int32, np.float32, bool))
        return RecordsState(count, no_loss(), score, record)

    def update(
        self, state: RecordsState, seen: Observed, *, xp: Any
    ) -> tuple[RecordsState, Reading]:
        """Compares the loss with the largest one so far, then learns it."""
        bad = seen.bad_loss
        before = xp.where(seen.restart, 0, state.count)
        first = before == 0
        score = xp.where(first, 0.0, state.score)
        history, higher = add_loss(state.history, seen.loss, self.growth, first, ~bad, xp=xp)
        record = higher | (bad & state.record & ~first)
        learn = ~bad | record

        count = xp.where(learn & (before < _COUNTED), before + 1, before)
        t = numerics.as_float(count, xp=xp)
        expected = numerics.product(self.record_rate, t, xp=xp)
        others = numerics.product(numerics.complement(self.record_rate, t), t, xp=xp)
        usual = numerics.quotient(others, xp.where(t > 1, t - 1, 1.0), xp=xp)
        pairs = numerics.product(t, t + 1, xp=xp)
        first_steps = numerics.as_float(count - count + self.warmup_steps, xp=xp)
        weight = numerics.quotient(first_steps, xp.where(pairs > 0, pairs, 1.0), xp=xp)
        counts = learn & (count > self.warmup_steps) & (expected > 1)
        grown = numerics.product(score + weight, xp.where(record, expected, usual), xp=xp)
        alarm = counts & (numerics.product(self.alpha, grown, xp=xp) >= 1)

        score = xp.where(counts & ~alarm, grown, xp.where(alarm, 0.0, score))
        new = RecordsState(
            count=xp.where(alarm, 0, count),
            history=history,
            score=numerics.settle(score, xp=xp),
            record=record,
        )
        return new, Reading(alarm, alarm)
