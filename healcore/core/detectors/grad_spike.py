"""Gradient-norm spike: the global norm is far above its recent level.

The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations up
to the loss peak).
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import norm_spike
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"grad_norm"})

Config = norm_spike.NormSpikeConfig
State = norm_spike.NormSpikeState
init = norm_spike.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.grad_norm`, then learns it."""
    norm, learn = seen.grad_norm, seen.finite
    state, spike = norm_spike.update(config, state, norm, learn, seen.restart, xp=xp)
    cause = flag(spike.alarm, Cause.GRAD_SPIKE, xp=xp)
    return state, Reading(spike.alarm, spike.sustained, cause, spike.z)
