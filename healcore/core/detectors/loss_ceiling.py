"""Loss ceiling: the loss is above a fixed level, or above all that its first steps had.

The rules of Axolotl's loss watchdog (above `loss_watchdog_threshold` at three logs in a row) and of
the second half of llm-foundry's `KillLossSpike` (half of the window above the largest loss of the
first window, or above 10). Here each step counts once, and NaN changes nothing (docs/recipes.md).
Nothing is rejected and only the first steps are learnt, so it needs no escape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    ceiling: Any | None = None
    """Loss above which the run has gone wrong, in units of the loss; None for none."""
    first_steps: Any = 100
    """The largest loss of that many first steps is a ceiling too; 0 for none. Nothing is judged
    while they last: an untrained model's loss is no trouble."""
    first_ratio: Any = 1.0
    """That ceiling is this multiple of it (of its size, for a loss that is not above 0)."""
    sustain: Any = 3
    """Steps above it in a row that make it sustained."""


class State(NamedTuple):
    """The first losses, and the steps above the ceiling."""

    count: Any  # int32: steps learnt, up to `first_steps`
    top: Any  # float32: largest loss of the first steps
    run: Any  # int32: steps above the ceiling, in a row, up to `sustain`


def init(config: Config) -> State:
    """No step seen."""
    del config
    none = np.zeros((), np.int32)
    return State(none, np.zeros((), np.float32), none.copy())


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss`, or learns the ceiling from it; non-finite steps change nothing."""
    learn, loss = seen.finite, seen.loss
    count = xp.where(seen.restart, 0, state.count)
    early = count < config.first_steps
    top = xp.where((count == 0) | (loss > state.top), loss, state.top)
    top = xp.where(learn & early, top, state.top)

    above = numerics.product(config.first_ratio - 1.0, xp.abs(state.top), xp=xp)
    over = (loss > state.top + above) & (count > 0)
    if config.ceiling is not None:
        over = over | (loss > config.ceiling)
    alarm = learn & ~early & over
    run = xp.where(seen.restart, 0, state.run)
    more = xp.where(run < config.sustain, run + 1, run)
    run = xp.where(learn, xp.where(alarm, more, 0), run)
    sustained = alarm & (run >= config.sustain)
    cause = flag(alarm, Cause.DIVERGENCE, xp=xp)
    new = State(xp.where(learn & early, count + 1, count), top, run)
    return new, Reading(alarm, sustained, cause, loss - loss)
