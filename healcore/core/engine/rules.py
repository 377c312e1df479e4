"""When a rule fires, and which steps are skipped or soft.

A rule fires at once, when the trouble is sustained, after n hits in a row, or after several hits
within a window. Both counts are needed: a run in which every other step is NaN never has ten in a
row.

Steps with non-finite gradients are always skipped, outliers at most `max_skips` times in a row.
When batch after batch looks bad, the batches are not the cause: the spike is sustained by then, a
recovery has been ordered, and more skips would not help.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine.config import RuleConfig
from healcore.core.signals import Observed

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


def limit_skips(
    max_skips: Any, run: Any, wished: Any, softened: Any | None, seen: Observed, *, xp: Any
) -> tuple[Any, Any, Any | None]:
    """Skipped and soft steps, at most `max_skips` finite ones in a row.

    Args:
        max_skips: the limit.
        run: int32: finite steps skipped or softened in a row; an alarm-free step resets it.
        wished: bool: a rule wants to skip.
        softened: bool: a rule wants a soft step, or None if no rule of the policy ever does. A skip
            has precedence.
        seen: the step's signals.
        xp: the array namespace.

    Returns:
        The new `run`; bool: the step is skipped; bool: the step is soft, or None.
    """
    bad = ~seen.finite
    either = wished if softened is None else wished | softened
    finite = either & ~bad
    allowed = run < max_skips
    run = xp.where(bad, run, xp.where(finite, xp.where(allowed, run + 1, run), 0))
    held = (either & bad) | (finite & allowed)
    if seen.bad_grad is not None:
        held = held | seen.bad_grad  # under every policy
    if softened is None:
        return run, held, None
    skip = held & wished
    if seen.bad_grad is not None:
        skip = skip | seen.bad_grad
    return run, skip, held & ~skip
