"""Gradient-norm spike: the global norm is far above its recent level.

The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations up
to the loss peak).
"""

from __future__ import annotations

from typing import Any

from healcore.core.detectors import norm_spike
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading

NEEDS = frozenset({"grad_norm"})

Config = norm_spike.Config
State = norm_spike.State
init = norm_spike.init


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.grad_norm`, then learns it."""
    norm, cause = seen.grad_norm, Cause.GRAD_SPIKE
    return norm_spike.update(config, state, norm, seen.finite, seen.restart, cause, xp=xp)
