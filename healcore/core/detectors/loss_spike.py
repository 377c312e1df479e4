"""Loss spike: one bad batch, or a sustained departure from the run's own noise."""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import spike
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

Config = spike.Config
State = spike.State
init = spike.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss`, then learns it."""
    learn = seen.finite
    state, found = spike.update(config, state, seen.loss, learn, seen.restart, xp=xp)
    cause = flag(found.alarm | found.sustained, Cause.LOSS_SPIKE, xp=xp)
    z = xp.where(learn, found.z, 0.0)
    return state, Reading(found.alarm, found.sustained, cause, z)
