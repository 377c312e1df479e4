"""Vanishing gradients: the global norm stays below a floor.

The sign of a dead network, a detached graph or a loss without gradient. One tiny norm is normal (a
batch that is fully masked), `patience` of them in a row are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"grad_norm"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    threshold: Any = 1e-7
    """Norm below which a gradient counts as gone."""
    patience: Any = 20
    """Steps in a row that make the alarm."""


class State(NamedTuple):
    """One counter."""

    run: Any  # int32: steps below the floor, in a row, up to `patience`


def init(config: Config) -> State:
    """No step seen."""
    del config
    return State(np.zeros((), np.int32))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Counts steps whose `seen.grad_norm` is below the floor; non-finite steps change nothing."""
    gone = seen.grad_norm < config.threshold
    more = xp.where(state.run < config.patience, state.run + 1, state.run)
    run = xp.where(seen.finite, xp.where(gone, more, 0), state.run)
    run = xp.where(seen.restart, 0, run)
    alarm = seen.finite & gone & (run >= config.patience)
    cause = flag(alarm, Cause.GRAD_VANISHING, xp=xp)
    zero = seen.grad_norm - seen.grad_norm
    return State(run), Reading(alarm, alarm, cause, zero)
