"""Detectors of a loss that sets all-time records more often than chance allows.

Records: in an exchangeable stream, whose order carries no information, the t-th loss is a record
with probability 1/t, for any unit, scale and tails of the losses. The score multiplies likelihood
ratios: records with probability `record_rate` against records with probability 1/t. The probability
of any alarm in an endless run is therefore at most `alpha`; docs/detectors.md has the proof. A loss
that rises by design, or unshuffled data, set records too. So an alarm is evidence of damage only
for a well-mixed stream.

Instability: loss and gradient norm grow together from update to update. A loss far above its level
means a damaged model or different data. With different data the loss jumps at once and then falls
as the model learns them. A model damaged by its own updates sets record after record, with a
gradient norm many times its usual size. A few such steps at short intervals raise the alarm, in the
first steps of a run too, where records alone are not evidence.

A non-finite step directly after a record counts as a record, because a broken model overflows. Any
other non-finite step is ignored. The history restarts after an alarm, which accepts the new level,
and where a change is expected.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core.array_namespace import (
    Flag,
    Float,
    Int,
    Number,
    complement,
    one_like,
    xp,
)
from healcore.core.decision import Cause, DetectorResult
from healcore.core.ranges import Fraction, NotNegative, Range, Ratio, Steps, whole
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init

_MAX_COUNT = 1 << 22
"""Limit of the counts, exact as float32; `alpha` holds for 1e12 more steps."""
_MIN_NORM_WEIGHT = 0.03125
"""Smallest weight of a norm in the usual norm, which covers about 32 steps."""


class RecordHistory(NamedTuple):
    """Extremes of the loss since the start of the history, float32 0-d.

    They decide whether the next loss is a record, see `add_loss`. No window of losses is kept,
    because a record needs the extremes only.
    """

    highest: Float
    """The largest loss."""
    lowest: Float
    """The smallest loss."""
    last: Float
    """The last record; initially the first loss."""


def add_loss(
    history: RecordHistory, loss: Float, growth: Number, first: Flag, learn: Flag
) -> tuple[RecordHistory, Flag]:
    """Learns a loss, and decides whether the loss is a record.

    A record exceeds all earlier losses. It also exceeds the last record by the share `growth` of
    that record's height above the lowest loss. Without this share, a loss that rises by design
    would set records all the time.

    Args:
        history: the extremes before this step.
        loss: float32 0-d, finite where `learn` holds.
        growth: required growth over the last record, at least 0.
        first: whether the loss begins a history, bool 0-d.
        learn: whether the loss is learnt, bool 0-d.

    Returns:
        The new extremes, and whether the loss is a record, bool 0-d.
    """
    highest, lowest, last = (xp.where(first, loss, each) for each in history)
    margin = xp.product(growth, last - lowest)
    record = learn & (loss > highest) & (loss > last + margin)
    return RecordHistory(
        xp.where(learn, xp.maximum(loss, highest), highest),
        xp.where(learn, xp.minimum(loss, lowest), lowest),
        xp.where(record, loss, last),
    ), record


class RecordsState(NamedTuple):
    """History of the loss since the start or the last alarm, and the score.

    An alarm accepts the new level: the history then begins again. Otherwise every step at the new
    level would be an alarm.
    """

    count: Int
    """Steps learnt."""
    history: RecordHistory
    """Extremes of the loss."""
    score: Float
    """Evidence for damage; the alarm is at 1 / alpha."""
    record: Flag
    """The last step counted as a record."""


class RecordsConfig(NamedTuple):
    """Thresholds of the records detector: all-time records of the loss are too frequent.

    It has a bound on false alarms, `alpha`, and needs no unit of the loss. See the top of this
    file for the statistics.
    """

    alpha: Annotated[Number, Range(ge=1e-9, lt=1)] = 1e-3
    """Largest probability of any alarm in an endless exchangeable run."""
    record_rate: Fraction = 0.5
    """Probability of a record per step in a run with damage."""
    growth: NotNegative = 0.25
    """Required growth over the last record, as a share of that record's height above the lowest
    loss."""
    warmup_steps: Annotated[Number, whole(1, 1000)] = 3
    """Number of steps learnt before a record counts."""

    CAUSE = Cause.RECORDS
    NEEDS = ("loss",)
    init = zero_init(RecordsState)

    def update(
        self, state: RecordsState, seen: CheckedSignals
    ) -> tuple[RecordsState, DetectorResult]:
        """Compares the loss with the largest earlier loss, then learns it.

        Multiplies the score by the likelihood ratio of this step: high for a record, below 1
        otherwise. So the score falls while the loss behaves, and a few records in a row raise it.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `bad_loss` and `restart`.

        Returns:
            The state after the step, and the result. An alarm is sustained at once.
        """
        bad = seen.bad_loss
        before = xp.where(seen.restart, 0, state.count)
        first = before == 0
        score = xp.where(first, 0.0, state.score)
        history, higher = add_loss(state.history, seen.loss, self.growth, first, ~bad)
        record = higher | (bad & state.record & ~first)
        learn = ~bad | record

        count = xp.where(learn & (before < _MAX_COUNT), before + 1, before)
        t = xp.as_float(count)
        record_ratio = xp.product(self.record_rate, t)
        numerator = xp.product(complement(self.record_rate, t), t)
        other_ratio = xp.quotient(numerator, xp.where(t > 1, t - 1, 1.0))
        pairs = xp.product(t, t + 1)
        first_steps = xp.as_float(count - count + self.warmup_steps)
        weight = xp.quotient(first_steps, xp.where(pairs > 0, pairs, 1.0))
        counts = learn & (count > self.warmup_steps) & (record_ratio > 1)
        new_score = xp.product(score + weight, xp.where(record, record_ratio, other_ratio))
        alarm = counts & (xp.product(self.alpha, new_score) >= 1)

        score = xp.where(counts & ~alarm, new_score, xp.where(alarm, 0.0, score))
        new = RecordsState(
            count=xp.where(alarm, 0, count),
            history=history,
            score=xp.flush(score),
            record=record,
        )
        return new, DetectorResult(alarm)


class InstabilityState(NamedTuple):
    """Extremes of the loss, the usual norm, and the current series of records.

    A series ends after `patience` steps without a further record. Its records need not be
    consecutive steps, because a damaged model still has good batches.
    """

    count: Int
    """Steps learnt since the start of the history."""
    history: RecordHistory
    """Extremes of the loss."""
    usual: Float
    """Usual size of the gradient norm: an average, in which a norm counts for at most `norm_ratio`
    times the average."""
    records: Int
    """Records with a large norm at intervals of at most `patience` steps."""
    since: Int
    """Steps since the last such record."""


class InstabilityConfig(NamedTuple):
    """Thresholds of the instability detector: loss and gradient norm grow together.

    It finds a model that its own updates damage, from the first steps of a run on. A bad batch
    raises loss and norm for one step only, and makes no series of records.
    """

    growth: NotNegative = 0.25
    """Required growth over the last record, as a share of that record's height above the lowest
    loss."""
    records: Annotated[Number, whole(2, 1000)] = 3
    """Records with a large norm that raise the alarm."""
    norm_ratio: Ratio = 8.0
    """Multiple of the usual norm above which the norm at a record is large."""
    patience: Steps = 8
    """Largest interval in steps between two such records."""

    CAUSE = Cause.INSTABILITY
    NEEDS = ("loss", "grad_norm")
    init = zero_init(InstabilityState)

    def update(
        self, state: InstabilityState, seen: CheckedSignals
    ) -> tuple[InstabilityState, DetectorResult]:
        """Compares loss and norm with the history, then learns them.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `grad_norm`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at the last of `records` records
            with a large norm. An alarm is sustained at once.
        """
        learn, norm = seen.finite, seen.grad_norm
        before = xp.where(seen.restart, 0, state.count)
        first = before == 0
        grown = xp.where(first, 0, state.records)
        history, record = add_loss(state.history, seen.loss, self.growth, first, learn)
        usual = xp.where(first, 0.0, state.usual)
        large = xp.product(self.norm_ratio, usual)
        grows = (record & (norm > large)) | (~learn & (grown > 0) & (state.since == 0))
        lasts = state.since < self.patience
        grown = xp.where(grows, xp.where(lasts, grown + 1, 1), xp.where(lasts, grown, 0))
        alarm = grows & (grown >= self.records)

        count = xp.where(learn & (before < _MAX_COUNT), before + 1, before)
        learnt = xp.where(usual > 0, xp.minimum(norm, large), norm)
        one = one_like(norm)
        steps = xp.where(count > 0, xp.as_float(count), one)
        weight = xp.maximum(xp.quotient(one, steps), _MIN_NORM_WEIGHT)
        step = xp.product(weight, learnt - usual)
        new = InstabilityState(
            count=xp.where(alarm, 0, count),
            history=history,
            usual=xp.flush(usual + xp.where(learn, step, 0.0)),
            records=xp.where(alarm, 0, grown),
            since=xp.where(grows, 0, xp.where(learn & lasts, state.since + 1, state.since)),
        )
        return new, DetectorResult(alarm)
