"""When a rule fires: at once, when sustained, n times in a row, or often within a window.

Both counts are needed: a run in which every other step is NaN never has ten in a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine.config import RuleConfig

_NEVER = 1 << 30


class RuleState(NamedTuple):
    """Memory of one rule."""

    run: Any  # int32: hits in a row
    window: Any  # int32 (within,): 1 where one of the last steps was a hit; (0,): no window
    age: Any  # int32: steps since it last fired


class Firing(NamedTuple):
    """Whether a rule fires at one step."""

    fired: Any  # bool: its condition holds
    fresh: Any  # bool: fired, and not in the `quiet_steps` before; for alerts, saves and stops


def init(config: RuleConfig) -> RuleState:
    """A rule without hits."""
    return RuleState(
        np.zeros((), np.int32),
        np.zeros((config.within,), np.int32),
        np.full((), _NEVER, np.int32),
    )


def update(
    config: RuleConfig,
    state: RuleState,
    hit: Any,
    step: Any,
    quiet_steps: Any,
    *,
    xp: Any,
) -> tuple[RuleState, Firing]:
    """Counts one step; `hit`: a cause of the rule is present, `step`: the steps before this one.

    After `quiet_steps` without firing a firing is fresh.
    """
    run = xp.where(hit, xp.where(state.run < _NEVER, state.run + 1, state.run), 0)
    fired = hit & (run >= config.consecutive)
    window = state.window
    if config.within:
        here = xp.arange(config.within) == (step % config.within)[..., None]
        window = xp.where(here, xp.astype(hit, xp.int32)[..., None], window)
        fired = fired & (xp.sum(window, axis=-1) >= config.count)
    fresh = fired & (state.age >= quiet_steps)
    age = xp.where(fired, 0, xp.where(state.age < _NEVER, state.age + 1, state.age))
    return RuleState(run, window, age), Firing(fired, fresh)
