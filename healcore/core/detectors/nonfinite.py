"""Non-finite loss, gradient or update: NaN, Inf, and norms that overflowed float32.

An alarm at every such step. How many are too many, in a row or within a window, is the policy's
`when`: a count of consecutive steps alone misses a run in which every other step is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS: frozenset[str] = frozenset()


class Config(NamedTuple):
    """No thresholds: a number is finite or it is not."""


class State(NamedTuple):
    """Empty: there is nothing to remember."""


def init(config: Config) -> State:
    """An empty state."""
    del config
    return State()


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Reads the flags of `seen`; a bad update counts as a bad gradient."""
    del config
    never = seen.finite & False
    bad_loss = never if seen.bad_loss is None else seen.bad_loss
    bad_grad = never if seen.bad_grad is None else seen.bad_grad
    if seen.bad_update is not None:
        bad_grad = bad_grad | seen.bad_update
    alarm = bad_loss | bad_grad
    cause = flag(bad_loss, Cause.NONFINITE_LOSS, xp=xp)
    cause = cause | flag(bad_grad, Cause.NONFINITE_GRAD, xp=xp)
    z = xp.astype(never, xp.float32)
    return state, Reading(alarm, alarm, cause, z)
