"""Plateau: the loss has stopped falling, or is at the level of guessing.

The mean over each `window` steps is compared with the best window so far, in units of the loss's
own step-to-step change. `chance_level` is the loss of guessing: ln 2 for a preference loss, ln V
for a vocabulary of V. A window within `chance_margin` of it is a plateau too.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.ranges import Level, NotNegative, Positive, Steps, whole
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading


class PlateauState(NamedTuple):
    """The current window, the best window, and the change per step."""

    count: Any  # int32: steps in the current window
    mean: Any  # float32: mean of the current window so far
    best: Any  # float32: lowest window mean
    windows: Any  # int32: finished windows, at most 1
    stale: Any  # int32: consecutive windows without improvement, at most `patience`
    last: Any  # float32: previous loss
    change: Any  # float32: moving average of the absolute step-to-step change of the loss
    chance: Any  # bool: the last finished window was at chance level


class PlateauConfig(NamedTuple):
    """Thresholds of the plateau detector."""

    window: Annotated[Any, whole(2)] = 500
    """Steps per window."""
    patience: Steps = 3
    """Consecutive windows without improvement that raise the alarm."""
    min_improvement: NotNegative = 0.1
    """Smallest gain of a better window, in mean absolute step-to-step changes."""
    chance_level: Level = None
    """Loss of guessing, for example 0.6931 (ln 2), or None for no such comparison."""
    chance_margin: Positive = 0.01
    """Largest distance from `chance_level` that counts as guessing."""

    CAUSE = Cause.PLATEAU
    NEEDS = frozenset({"loss"})

    def init(self) -> PlateauState:
        """The state before the first step."""
        counts = {name: np.zeros((), np.int32) for name in ("count", "windows", "stale")}
        floats = {name: np.zeros((), np.float32) for name in ("mean", "best", "last", "change")}
        return PlateauState(**counts, **floats, chance=np.zeros((), bool))

    def update(
        self, state: PlateauState, seen: Observed, *, xp: Any
    ) -> tuple[PlateauState, Reading]:
        """Adds `seen.loss` to its window; the alarm lasts until a window is better."""
        learn, loss, restart = seen.finite, seen.loss, seen.restart
        started = (state.windows > 0) | (state.count > 0)
        count = xp.where(learn, state.count + 1, state.count)
        divisor = numerics.as_float(xp.where(count > 0, count, 1), xp=xp)
        step = numerics.quotient(loss - state.mean, divisor, xp=xp)
        mean = state.mean + xp.where(learn, step, 0.0)
        moved = xp.where(started, xp.abs(loss - state.last), 0.0)
        change = numerics.ema(state.change, moved, 0.01, learn & started, xp=xp)
        # The average starts at the first change. A slow start from zero would make noise look like
        # an improvement.
        change = xp.where(learn & started & (state.change == 0), moved, change)

        done = learn & (count >= self.window)
        first = done & (state.windows == 0)
        needed = xp.where(done, self.min_improvement * change, 0.0)
        better = first | (done & (state.best - mean > needed))
        longer = xp.where(state.stale < self.patience, state.stale + 1, state.stale)
        stale = xp.where(done, xp.where(better, 0, longer), state.stale)
        guessing = state.chance
        if self.chance_level is not None:
            near = xp.abs(mean - self.chance_level) <= self.chance_margin
            guessing = xp.where(done, near, guessing)

        alarm = learn & ~restart & ((stale >= self.patience) | guessing)
        new = PlateauState(
            count=xp.where(restart | done, 0, count),
            mean=numerics.settle(xp.where(restart | done, 0.0, mean), xp=xp),
            best=xp.where(better, mean, state.best),
            windows=xp.where(restart, 0, xp.where(done, 1, state.windows)),
            stale=xp.where(restart, 0, stale),
            last=xp.where(learn, loss, state.last),
            change=change,
            chance=guessing & ~restart,
        )
        return new, Reading(alarm, alarm)
