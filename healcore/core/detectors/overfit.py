"""Overfitting: the evaluation loss stays far above the training loss.

The training loss is smoothed, because an evaluation averages over many batches and a training step
does not. One high evaluation is noise; `patience` in a row raise the alarm. The alarm lasts until
an evaluation with a smaller gap.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.ranges import Fraction, Positive, Steps
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading


class OverfitState(NamedTuple):
    """Smoothed training loss, and the count of consecutive high evaluations."""

    train: Any  # float32: smoothed training loss
    started: Any  # bool: `train` has learnt a loss
    run: Any  # int32: consecutive evaluations with too wide a gap, at most `patience`


class OverfitConfig(NamedTuple):
    """Thresholds of the overfitting detector."""

    max_gap: Positive = 2.0
    """Largest normal difference of evaluation loss and smoothed training loss."""
    patience: Steps = 2
    """Consecutive high evaluations that raise the alarm."""
    ema_decay: Fraction = 0.98
    """Decay of the smoothed training loss per step."""

    CAUSE = Cause.OVERFIT
    NEEDS = frozenset({"loss", "eval_loss"})

    def init(self) -> OverfitState:
        """The state before the first step."""
        return OverfitState(np.zeros((), np.float32), np.zeros((), bool), np.zeros((), np.int32))

    def update(
        self, state: OverfitState, seen: Observed, *, xp: Any
    ) -> tuple[OverfitState, Reading]:
        """Learns `seen.loss`; judges `seen.eval_loss` at steps with an evaluation."""
        learn = seen.finite
        rate = numerics.complement(self.ema_decay, seen.loss)
        train = numerics.ema(state.train, seen.loss, rate, learn, xp=xp)
        train = xp.where(learn & ~state.started, seen.loss, train)
        started = state.started | learn
        too_wide = seen.eval_loss - train > self.max_gap
        longer = xp.where(state.run < self.patience, state.run + 1, state.run)
        streak = xp.where(seen.has_eval & started, xp.where(too_wide, longer, 0), state.run)
        streak = xp.where(seen.restart, 0, streak)
        alarm = streak >= self.patience
        return OverfitState(train, started, streak), Reading(alarm, alarm)
