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
from healcore.core.engine.config import RuleConfig
from healcore.core.signals import Observed

_NEVER = 1 << 30


class RuleState(NamedTuple):
    """Hits of one rule, and its last firing."""

    run: Any  # int32: hits in a row
    window: Any  # int32 (within,): ring of the last steps, 1 for a hit; (0,) without a window
    age: Any  # int32: steps since the rule last fired


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
    streak = xp.where(hit, xp.where(state.run < _NEVER, state.run + 1, state.run), 0)
    fired = hit & (streak >= config.consecutive)
    window = state.window
    if config.within:
        slot, value = step % config.within, xp.astype(hit, xp.int32)
        window = numerics.with_slot(window, slot, value, xp=xp)
        fired = fired & (xp.sum(window, axis=-1) >= config.count)
    fresh = fired & (state.age >= quiet_steps)
    age = xp.where(fired, 0, xp.where(state.age < _NEVER, state.age + 1, state.age))
    return RuleState(streak, window, age), Firing(fired, fresh)


def limit_skips(
    max_skips: Any, streak: Any, wished: Any, seen: Observed, *, xp: Any
) -> tuple[Any, Any]:
    """Decides which steps are skipped, at most `max_skips` finite ones in a row.

    Args:
        max_skips: the limit.
        streak: int32: finite steps skipped in a row; a step without an alarm resets it.
        wished: bool: a rule orders a skip.
        seen: the step's signals.
        xp: the array namespace.

    Returns:
        The new `streak`; bool: the step is skipped.
    """
    bad = ~seen.finite
    finite_order = wished & ~bad
    allowed = streak < max_skips
    streak = xp.where(bad, streak, xp.where(finite_order, xp.where(allowed, streak + 1, streak), 0))
    granted = (wished & bad) | (finite_order & allowed)
    if seen.bad_grad is not None:
        granted = granted | seen.bad_grad  # under every policy
    return streak, granted
