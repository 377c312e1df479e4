"""Loss window: the loss is many standard deviations above the mean of the last ones.

One half of OLMo's skip-step rule (`grad_window` is the other); `loss_spike` finds more.
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import window_outlier
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

Config = window_outlier.WindowOutlierConfig
State = window_outlier.WindowOutlierState
init = window_outlier.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss`, then learns it."""
    loss, learn = seen.loss, seen.finite
    state, reading = window_outlier.update(config, state, loss, learn, seen.restart, xp=xp)
    cause = flag(reading.alarm, Cause.LOSS_SPIKE, xp=xp)
    return state, Reading(reading.alarm, reading.sustained, cause, reading.z)
