"""Records: the loss sets all-time records far more often than an exchangeable stream can.

In an exchangeable stream the t-th loss is a record with probability 1/t, for any unit, scale and
tails of the losses. The score multiplies likelihood ratios: records with probability `record_rate`
against records with probability 1/t. The probability of any alarm in an endless run is therefore at
most `alpha`; docs/detectors.md has the proof.

A loss that rises by design, or unshuffled data, set records too. So an alarm is evidence of damage
only for a well-mixed stream.

A non-finite loss directly after a record counts as a record, because a broken model overflows. Any
other non-finite loss is ignored. After an alarm, score and history restart. The new level is then
accepted, and another alarm needs new evidence.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.ranges import Fraction, NotNegative, number, whole
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading

_COUNTED = 1 << 22  # limit of the count, exact as float32; `alpha` holds for 1e12 more steps


class History(NamedTuple):
    """Extremes of the loss since the start of the history."""

    highest: Any  # float32: the largest loss
    lowest: Any  # float32: the smallest loss
    last: Any  # float32: the last record; initially the first loss


def no_loss() -> History:
    """The history before the first loss."""
    return History(*(np.zeros((), np.float32) for _ in History._fields))


def add_loss(
    history: History, loss: Any, growth: Any, first: Any, learn: Any, *, xp: Any
) -> tuple[History, Any]:
    """Learns a loss, and decides whether it is a record.

    A record exceeds all earlier losses. It also exceeds the last record by the share `growth` of
    that record's height above the lowest loss.

    Args:
        history: history of the earlier losses.
        loss: float32, finite.
        growth: the share, at least 0.
        first: bool: the loss begins a history.
        learn: bool: the loss counts; otherwise the history stays and the loss is no record.
        xp: the array namespace.

    Returns:
        The new history, and bool: the loss is a record.
    """
    highest, lowest, last = (xp.where(first, loss, each) for each in history)
    margin = numerics.product(growth, last - lowest, xp=xp)
    record = learn & (loss > highest) & (loss > last + margin)
    return History(
        xp.where(learn, xp.maximum(loss, highest), highest),
        xp.where(learn, xp.minimum(loss, lowest), lowest),
        xp.where(record, loss, last),
    ), record


class RecordsState(NamedTuple):
    """History of the loss since the start or the last alarm, and the score."""

    count: Any  # int32: steps learnt
    history: History
    score: Any  # float32: evidence for damage; the alarm is at 1 / alpha
    record: Any  # bool: the last step counted as a record


class RecordsConfig(NamedTuple):
    """Thresholds of the records detector."""

    alpha: Annotated[Any, number(least=1e-9, below=1)] = 1e-3
    """Largest probability of any alarm in an endless exchangeable run."""
    record_rate: Fraction = 0.5
    """Probability of a record per step in a run with damage."""
    growth: NotNegative = 0.25
    """Required growth over the last record, as a share of that record's height above the lowest
    loss."""
    warmup_steps: Annotated[Any, whole(1, 1000)] = 3
    """Number of steps learnt before a record counts."""

    CAUSE = Cause.RECORDS
    NEEDS = frozenset({"loss"})

    def init(self) -> RecordsState:
        """The state before the first step."""
        count, score, record = (np.zeros((), kind) for kind in (np.int32, np.float32, bool))
        return RecordsState(count, no_loss(), score, record)

    def update(
        self, state: RecordsState, seen: Observed, *, xp: Any
    ) -> tuple[RecordsState, Reading]:
        """Compares the loss with the largest earlier loss, then learns it."""
        bad = seen.bad_loss
        before = xp.where(seen.restart, 0, state.count)
        first = before == 0
        score = xp.where(first, 0.0, state.score)
        history, higher = add_loss(state.history, seen.loss, self.growth, first, ~bad, xp=xp)
        record = higher | (bad & state.record & ~first)
        learn = ~bad | record

        count = xp.where(learn & (before < _COUNTED), before + 1, before)
        t = numerics.as_float(count, xp=xp)
        record_ratio = numerics.product(self.record_rate, t, xp=xp)
        numerator = numerics.product(numerics.complement(self.record_rate, t), t, xp=xp)
        other_ratio = numerics.quotient(numerator, xp.where(t > 1, t - 1, 1.0), xp=xp)
        pairs = numerics.product(t, t + 1, xp=xp)
        first_steps = numerics.as_float(count - count + self.warmup_steps, xp=xp)
        weight = numerics.quotient(first_steps, xp.where(pairs > 0, pairs, 1.0), xp=xp)
        counts = learn & (count > self.warmup_steps) & (record_ratio > 1)
        new_score = numerics.product(
            score + weight, xp.where(record, record_ratio, other_ratio), xp=xp
        )
        alarm = counts & (numerics.product(self.alpha, new_score, xp=xp) >= 1)

        score = xp.where(counts & ~alarm, new_score, xp.where(alarm, 0.0, score))
        new = RecordsState(
            count=xp.where(alarm, 0, count),
            history=history,
            score=numerics.settle(score, xp=xp),
            record=record,
        )
        return new, Reading(alarm, alarm)
