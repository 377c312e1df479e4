"""When a rule fires, and which steps are skipped.

A rule fires at once, on sustained alarms, after n hits in a row, or after several hits within a
window. The window is needed because a run in which every other step is NaN never has ten hits in a
row.

Steps with non-finite gradients are always skipped, other steps at most `max_skips` times in a row.
If all batches look bad, the batches are not the cause. The spike is then sustained and recovery is
ordered, so more skips would not help.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.engine.config import EngineConfig, RuleConfig
from healcore.core.signals import Observed
from healcore.core.verdict import NONFINITE, Action

_NEVER = 1 << 30
ONCE = int(Action.ALERT | Action.SAVE | Action.STOP)
"""Actions that a rule orders once, not at each step of the same trouble."""


class RuleState(NamedTuple):
    """Hits of one rule, and its last firing."""

    run: Any  # int32: hits in a row; 0 for a rule that fires at one hit
    window: Any  # int32 (within,): ring of the last steps, 1 for a hit; (0,) without a window
    age: Any  # int32: steps since the rule last fired; only counted for `ONCE`


class Firing(NamedTuple):
    """Whether a rule fires at one step."""

    fired: Any  # bool: the rule's condition holds
    fresh: Any  # bool: fired for the first time in `quiet_steps` steps; for alerts, saves and stops


def init(config: RuleConfig) -> RuleState:
    """The state of a rule without hits."""
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
    """Counts one step; `hit` tells whether a cause of the rule is present, `step` is its index."""
    streak, fired = state.run, hit
    if not (isinstance(config.consecutive, int) and config.consecutive == 1):
        streak = (state.run + 1) * hit
        fired = hit & (streak >= config.consecutive)
    window = state.window
    if config.within:
        slot, value = step % config.within, xp.astype(hit, xp.int32)
        window = numerics.with_slot(window, slot, value, xp=xp)
        fired = fired & (xp.sum(window, axis=-1) >= config.count)
    if not config.action & ONCE:
        return RuleState(streak, window, state.age), Firing(fired, fired)
    fresh = fired & (state.age >= quiet_steps)
    return RuleState(streak, window, xp.where(fired, 0, state.age + 1)), Firing(fired, fresh)


def skips_finite(config: EngineConfig) -> bool:
    """Whether a rule can skip a step with a finite loss and gradient."""
    return any(rule.skip and rule.causes & ~int(NONFINITE) for rule in config.rules)


def limit_skips(
    config: EngineConfig, streak: Any, wished: Any, seen: Observed, *, xp: Any
) -> tuple[Any, Any]:
    """Decides which steps are skipped, at most `max_skips` finite ones in a row.

    Args:
        config: the policy.
        streak: int32: finite steps skipped in a row; a step without an alarm resets it.
        wished: bool: a rule orders a skip.
        seen: the step's signals.
        xp: the array namespace.

    Returns:
        The new `streak`; bool: the step is skipped.
    """
    granted = wished
    if skips_finite(config):
        order = wished & seen.finite
        allowed = streak < config.max_skips
        granted = wished & (~seen.finite | allowed)
        streak = xp.where(seen.finite, (streak + (order & allowed)) * order, streak)
    if seen.bad_grad is not None:
        granted = granted | seen.bad_grad  # under every policy
    return streak, granted
