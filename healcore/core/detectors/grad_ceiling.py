"""Gradient ceiling: the norm is above an absolute limit, or many times the largest of the first.

Two rules of Megatron-LM: `grad_norm_skip_threshold` (megatron/core/optimizer/optimizer.py), and
`is_unexpectedly_large` (megatron/core/rerun_state_machine.py), ten times the largest of the first
100. The limit is the user's and has no escape. The first norms are counted again after `escape`
alarms in a row; as published they never are, even if they were zeros (a frozen network).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"grad_norm"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    ceiling: Any | None = None
    """Norm above which a gradient is out of line; None for none."""
    first_ratio: Any | None = 10.0
    """A norm is also an outlier from this multiple of the first norms' largest; None for none."""
    first_steps: Any = 100
    """How many norms are the first."""
    sustain: Any = 5
    """Alarms in a row that make it sustained."""
    escape: Any = 100
    """Alarms in a row after which the first norms are counted again."""


class State(NamedTuple):
    """The first norms, and the alarms in a row."""

    count: Any  # int32: norms counted, up to `first_steps`
    top: Any  # float32: the largest of them
    run: Any  # int32: alarms in a row, up to `escape`


def init(config: Config) -> State:
    """No norm seen."""
    del config
    none = np.zeros((), np.int32)
    return State(none, np.zeros((), np.float32), none.copy())


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.grad_norm`, or learns the ceiling from it; non-finite steps change nothing."""
    norm = seen.grad_norm
    learn = seen.finite & (norm > 0)
    count = xp.where(seen.restart, 0, state.count)
    early = count < config.first_steps
    top = xp.where(count == 0, 0.0, state.top)
    far = norm < 0
    if config.first_ratio is not None:
        far = far | (~early & (norm >= config.first_ratio * top))
    if config.ceiling is not None:
        far = far | (norm > config.ceiling)
    alarm = learn & far

    run = xp.where(seen.restart, 0, state.run)
    more = xp.where(run < config.escape, run + 1, run)
    run = xp.where(learn, xp.where(alarm, more, 0), run)
    sustained = alarm & (run >= config.sustain)
    taught = learn & early & ~alarm
    count = xp.where(taught, count + 1, count)
    top = xp.where(taught & (norm > top), norm, top)
    if config.first_ratio is not None:
        escaped = alarm & (run >= config.escape)
        count, run = xp.where(escaped, 0, count), xp.where(escaped, 0, run)
    cause = flag(alarm, Cause.GRAD_SPIKE, xp=xp)
    known = top > 0
    z = numerics.quotient(norm, xp.where(known, top, 1.0), xp=xp)
    z = xp.where(known & learn & ~early, z, 0.0)
    return State(count, top, run), Reading(alarm, sustained, cause, z)
