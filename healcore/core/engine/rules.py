"""When a rule fires.

A rule fires at once, on sustained alarms, after n hits in a row, or after several hits within a
window. The window is needed because a run in which every other step is NaN never has ten hits in a
row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import RuleConfig
from healcore.core.tree import Int, zeros
from healcore.core.verdict import Action

_NEVER = 1 << 30
ONCE = int(Action.ALERT | Action.SAVE | Action.STOP)
"""Actions that a rule orders once, not at each step of the same trouble."""


class RuleState(NamedTuple):
    """Hits of one rule, and its last firing."""

    run: Int  # hits in a row; 0 for a rule that fires at one hit
    window: Int  # (within,): ring of the last steps, 1 for a hit; (0,) without a window
    age: Int  # steps since the rule last fired; only counted for `ONCE`


class Firing(NamedTuple):
    """Whether a rule fires at one step."""

    fired: Any  # bool: the rule's condition holds
    fresh: Any  # bool: fired for the first time in `quiet_steps` steps; for alerts, saves and stops


def init(config: RuleConfig) -> RuleState:
    """The state of a rule without hits."""
    window = np.zeros((config.within,), np.int32)
    return zeros(RuleState)._replace(window=window, age=np.full((), _NEVER, np.int32))


def update(
    config: RuleConfig, state: RuleState, hit: Any, step: Any, quiet_steps: Any, *, xp: Any
) -> tuple[RuleState, Firing]:
    """Counts one step; `hit` tells whether a cause of the rule is present, `step` is its index."""
    run, window, age = state
    fired = fresh = hit
    if not (isinstance(config.consecutive, int) and config.consecutive == 1):
        run = (run + 1) * hit
        fired = fresh = hit & (run >= config.consecutive)
    if config.within:
        slot, value = step % config.within, xp.astype(hit, xp.int32)
        window = numerics.with_slot(window, slot, value, xp=xp)
        fired = fresh = fired & (xp.sum(window, axis=-1) >= config.count)
    if config.action & ONCE:
        fresh = fired & (age >= quiet_steps)
        age = xp.where(fired, 0, age + 1)
    return RuleState(run, window, age), Firing(fired, fresh)
