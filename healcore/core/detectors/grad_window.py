"""Gradient window: the norm is many standard deviations above the mean of the last ones.

One half of OLMo's skip-step rule (`loss_window` is the other). The norm is that before clipping.
MaxText's rule has the clipped one, which a limit of 1.0 makes useless.
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import window_outlier
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"grad_norm"})

Config = window_outlier.WindowOutlierConfig
State = window_outlier.WindowOutlierState
init = window_outlier.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.grad_norm`, then learns it."""
    norm, learn = seen.grad_norm, seen.finite
    state, reading = window_outlier.update(config, state, norm, learn, seen.restart, xp=xp)
    cause = flag(reading.alarm, Cause.GRAD_SPIKE, xp=xp)
    return state, Reading(reading.alarm, reading.sustained, cause, reading.z)
