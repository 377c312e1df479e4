"""Norm spike: a gradient or update norm far above its own recent level."""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core.detectors import spike
from healcore.core.verdict import Reading, flag

State = spike.State
init = spike.init

_spike = spike.Config()


class Config(NamedTuple):
    """Thresholds; numbers may be arrays. The same as of a loss spike, except `min_noise`."""

    z_threshold: Any = _spike.z_threshold
    evidence: Any = _spike.evidence
    window: Any = _spike.window
    min_noise: Any = 0.18
    """Noise taken at least, as a share of the level: an alarm is three times the level or more."""


def update(
    config: Config, state: State, norm: Any, learn: Any, restart: Any, cause: Any, *, xp: Any
) -> tuple[State, Reading]:
    """Judges `norm` (float32), then learns it. A norm of 0 is neither judged nor learnt."""
    learn = learn & (norm > 0)
    state, found = spike.update(config, state, norm, learn, restart, xp=xp)
    causes = flag(found.alarm | found.sustained, cause, xp=xp)
    return state, Reading(found.alarm, found.sustained, causes, found.z)
