"""Instability: loss and gradient norm grow together from update to update.

A loss far above its level means a damaged model or different data. With different data the loss
jumps at once and then falls as the model learns them. A model damaged by its own updates sets
record after record (`records`), with a gradient norm many times its usual size. A few such steps at
short intervals raise the alarm. This works in the first steps of a run too, where records alone are
not evidence. A non-finite step directly after such a step counts as one.

The history restarts after an alarm, and where a change is expected.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.detectors import records
from healcore.core.ranges import NotNegative, Ratio, Steps, whole
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading

_NORM = 0.03125  # smallest weight of a norm in the usual norm, which covers about 32 steps
_COUNTED = 1 << 22  # limit of the count; the weight is constant from 32 steps on


class InstabilityState(NamedTuple):
    """Extremes of the loss, the usual norm, and the current series of records."""

    count: Any  # int32: steps learnt since the start of the history
    history: records.History
    usual: Any  # float32: usual size of the gradient norm
    records: Any  # int32: records with a large norm at intervals of at most `patience` steps
    since: Any  # int32: steps since the last such record


class InstabilityConfig(NamedTuple):
    """Thresholds of the instability detector."""

    growth: NotNegative = 0.25
    """Required growth over the last record, as a share of that record's height above the lowest
    loss."""
    records: Annotated[Any, whole(2, 1000)] = 3
    """Records with a large norm that raise the alarm."""
    norm_ratio: Ratio = 8.0
    """Multiple of the usual norm above which the norm at a record is large."""
    patience: Steps = 8
    """Largest interval in steps between two such records."""

    CAUSE = Cause.INSTABILITY
    NEEDS = frozenset({"loss", "grad_norm"})

    def init(self) -> InstabilityState:
        """The state before the first step."""
        zero = np.zeros((), np.int32)
        usual = np.zeros((), np.float32)
        return InstabilityState(zero, records.no_loss(), usual, zero.copy(), zero.copy())

    def update(
        self, state: InstabilityState, seen: Observed, *, xp: Any
    ) -> tuple[InstabilityState, Reading]:
        """Compares loss and norm with the history, then learns them."""
        learn, norm = seen.finite, seen.grad_norm
        before = xp.where(seen.restart, 0, state.count)
        first = before == 0
        grown = xp.where(first, 0, state.records)
        history, record = records.add_loss(
            state.history, seen.loss, self.growth, first, learn, xp=xp
        )
        usual = xp.where(first, 0.0, state.usual)
        large = numerics.product(self.norm_ratio, usual, xp=xp)
        grows = (record & (norm > large)) | (~learn & (grown > 0) & (state.since == 0))
        lasts = state.since < self.patience
        grown = xp.where(grows, xp.where(lasts, grown + 1, 1), xp.where(lasts, grown, 0))
        alarm = grows & (grown >= self.records)

        count = xp.where(learn & (before < _COUNTED), before + 1, before)
        learnt = xp.where(usual > 0, xp.minimum(norm, large), norm)
        one = norm - norm + 1.0
        steps = xp.where(count > 0, numerics.as_float(count, xp=xp), one)
        weight = xp.maximum(numerics.quotient(one, steps, xp=xp), _NORM)
        step = numerics.product(weight, learnt - usual, xp=xp)
        new = InstabilityState(
            count=xp.where(alarm, 0, count),
            history=history,
            usual=numerics.settle(usual + xp.where(learn, step, 0.0), xp=xp),
            records=xp.where(alarm, 0, grown),
            since=xp.where(grows, 0, xp.where(learn & lasts, state.since + 1, state.since)),
        )
        return new, Reading(alarm, alarm)
