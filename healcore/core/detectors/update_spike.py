"""Update-norm spike: the last update was far longer than the recent ones.

Marin 32B had update-norm spikes before its loss spikes, with clipping and skipping both on: a
decayed second moment turns an ordinary gradient into a huge step, which no gradient norm shows.
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import norm_spike
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"update_norm"})

Config = norm_spike.NormSpikeConfig
State = norm_spike.NormSpikeState
init = norm_spike.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.update_norm`, then learns it."""
    norm, learn = seen.update_norm, seen.finite
    state, spike = norm_spike.update(config, state, norm, learn, seen.restart, xp=xp)
    cause = flag(spike.alarm, Cause.UPDATE_SPIKE, xp=xp)
    return state, Reading(spike.alarm, spike.sustained, cause, spike.z)
