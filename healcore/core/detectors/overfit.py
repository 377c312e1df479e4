"""Overfitting: the evaluation loss stays far above the training loss.

The training loss is smoothed, because an evaluation averages over many batches and a training step
does not. One high evaluation is noise, `patience` in a row are the alarm. It lasts until an
evaluation is below the gap again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss", "eval_loss"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    max_gap: Any = 2.0
    """Evaluation loss minus smoothed training loss that is too much, in units of the loss."""
    patience: Any = 2
    """Evaluations in a row that make the alarm."""
    ema_decay: Any = 0.98
    """Decay of the smoothed training loss per step."""


class State(NamedTuple):
    """The smoothed training loss, and the high evaluations in a row."""

    train: Any  # float32: smoothed training loss
    started: Any  # bool: `train` holds something
    run: Any  # int32: evaluations in a row with too wide a gap, up to `patience`


def init(config: Config) -> State:
    """No step seen."""
    del config
    return State(np.zeros((), np.float32), np.zeros((), bool), np.zeros((), np.int32))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Learns `seen.loss`; judges `seen.eval_loss` at the steps that have one."""
    learn = seen.finite
    rate = numerics.complement(config.ema_decay, seen.loss)
    train = numerics.ema(state.train, seen.loss, rate, learn, xp=xp)
    train = xp.where(learn & ~state.started, seen.loss, train)
    started = state.started | learn
    judged = seen.has_eval & started
    gap = seen.eval_loss - train
    more = xp.where(state.run < config.patience, state.run + 1, state.run)
    run = xp.where(judged, xp.where(gap > config.max_gap, more, 0), state.run)
    run = xp.where(seen.restart, 0, run)
    alarm = run >= config.patience
    cause = flag(alarm, Cause.OVERFIT, xp=xp)
    z = xp.where(judged, gap, 0.0)
    return State(train, started, run), Reading(alarm, alarm, cause, z)
