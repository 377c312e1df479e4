"""Update-norm spike: the last update was far longer than the recent ones.

Marin 32B had update-norm spikes before its loss spikes, with clipping and skipping both on: a
decayed second moment turns an ordinary gradient into a huge step, which no gradient norm shows.
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import norm_spike
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading

NEEDS = frozenset({"update_norm"})

Config = norm_spike.Config
State = norm_spike.State
init = norm_spike.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.update_norm`, then learns it."""
    norm, cause = seen.update_norm, Cause.UPDATE_SPIKE
    return norm_spike.update(config, state, norm, seen.finite, seen.restart, cause, xp=xp)
