"""Records: the loss sets all-time records far more often than an exchangeable stream can.

In an exchangeable stream the t-th loss is a record with probability 1/t, whatever the unit, the
scale and the tails of the losses. The score multiplies the likelihood ratios of records with
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

from healcore.core import loss_records, numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

_COUNTED = 1 << 22  # exact as a float32; the bound still holds for 1e12 steps after it


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    alpha: Any = 1e-3
    """Largest probability of any alarm in an endless exchangeable run."""
    record_rate: Any = 0.5
    """Probability of a record in the run that the alarm is for."""
    growth: Any = 0.25
    """Share of the last record's height above the lowest loss by which a record exceeds it."""
    warmup_steps: Any = 3
    """Steps learnt before a record counts."""


class State(NamedTuple):
    """Extremes of the loss since the start or the last alarm, and the score."""

    count: Any  # int32: steps learnt
    history: loss_records.History
    score: Any  # float32: an alarm at 1 / alpha
    record: Any  # bool: the last step was a record, or not finite after one


def init(config: Config) -> State:
    """No step seen."""
    del config
    count, score, record = (np.zeros((), kind) for kind in (np.int32, np.float32, bool))
    return State(count, loss_records.init(), score, record)


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Compares the loss with the largest one so far, then learns it."""
    bad = seen.bad_loss
    before = xp.where(seen.restart, 0, state.count)
    first = before == 0
    score = xp.where(first, 0.0, state.score)
    history, higher = loss_records.update(
        state.history, seen.loss, config.growth, first, ~bad, xp=xp
    )
    record = higher | (bad & state.record & ~first)
    learn = ~bad | record

    count = xp.where(learn & (before < _COUNTED), before + 1, before)
    t = numerics.as_float(count, xp=xp)
    expected = numerics.product(config.record_rate, t, xp=xp)
    usual = numerics.complement(config.record_rate, t)
    usual = numerics.quotient(numerics.product(usual, t, xp=xp), xp.where(t > 1, t - 1, 1.0), xp=xp)
    pairs = numerics.product(t, t + 1, xp=xp)
    first_steps = numerics.as_float(count - count + config.warmup_steps, xp=xp)
    weight = numerics.quotient(first_steps, xp.where(pairs > 0, pairs, 1.0), xp=xp)
    counts = learn & (count > config.warmup_steps) & (expected > 1)
    grown = numerics.product(score + weight, xp.where(record, expected, usual), xp=xp)
    share = numerics.product(config.alpha, grown, xp=xp)
    alarm = counts & (share >= 1)

    new = State(
        count=xp.where(alarm, 0, count),
        history=history,
        score=numerics.settle(xp.where(counts & ~alarm, grown, xp.where(alarm, 0.0, score)), xp=xp),
        record=record,
    )
    return new, Reading(
        alarm, alarm, flag(alarm, Cause.RECORDS, xp=xp), xp.where(counts, share, 0.0)
    )
