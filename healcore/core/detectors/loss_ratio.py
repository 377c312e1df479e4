"""Loss ratio: the loss is several times the mean of the last ones.

The rule of Lightning's `SpikeDetection` (three times the mean of 10), llm-foundry's `KillLossSpike`
(twice the mean of the window, five in a row) and the self-healing callback for TRL (five times the
mean of 100), for the recipes: `loss_spike` uses the run's noise and finds far more.

Here only finite, accepted losses enter the window, and after `escape` outliers in a row it restarts
at the present loss (docs/recipes.md). While a loss in the window is negative, or half of them are
0, a loss has to be `ratio` times the largest size in a full window away from the mean: the noise of
a loss around zero (GRPO) is no spike, and a window of zeros judges nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics, window
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})


class Config(NamedTuple):
    """Thresholds; numbers may be arrays, but for `window`."""

    ratio: Any = 2.0
    """Multiple of the mean of the last losses at which a loss is out of line; above 1."""
    window: int = 100
    """How many accepted losses count. Static: it is the length of an array in the state."""
    warmup_steps: Any = 25
    """Losses learnt before one is judged; at most `window`."""
    sustain: Any = 5
    """Losses out of line in a row that make it sustained."""
    escape: Any = 25
    """Losses out of line in a row after which the window restarts at the present loss."""


class State(NamedTuple):
    """The window, and the outliers in a row."""

    window: window.Window
    last: Any  # float32: last accepted loss
    run: Any  # int32: outliers in a row, up to `escape`


def init(config: Config) -> State:
    """No step seen."""
    return State(window.init(config.window), np.zeros((), np.float32), np.zeros((), np.int32))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss` against the window, then learns it if accepted."""
    learn, loss = seen.finite, seen.loss
    held = window.cleared(state.window, seen.restart, xp=xp)
    mean = window.mean(held, xp=xp)
    negative = xp.sum(xp.astype(held.values < 0, xp.int32), axis=-1)
    positive = xp.sum(xp.astype(held.values > 0, xp.int32), axis=-1)
    plain = (negative == 0) & (2 * positive > held.count)
    level = xp.where(plain, mean, window.largest(xp.abs(held.values), xp=xp))

    known = (held.count > 0) & (held.count >= config.warmup_steps) & (level > 0)
    known = known & (plain | (held.count >= config.window))
    gap = loss - mean
    needed = numerics.product(config.ratio, level, xp=xp)
    far = xp.where(plain, loss, gap) >= needed
    alarm = learn & known & far & (loss > state.last)

    run = xp.where(seen.restart, 0, state.run)
    run = xp.where(learn, xp.where(alarm, run + 1, 0), run)
    sustained = alarm & (run >= config.sustain)
    escaped = alarm & (run >= config.escape)
    taught = learn & (~alarm | escaped)
    held = window.cleared(held, escaped, xp=xp)
    held = window.push(held, config.window, loss, taught, xp=xp)

    z = numerics.quotient(gap, xp.where(known, level, 1.0), xp=xp)
    new = State(held, xp.where(taught, loss, state.last), xp.where(escaped, 0, run))
    cause = flag(alarm, Cause.LOSS_SPIKE, xp=xp)
    return new, Reading(alarm, sustained, cause, xp.where(known & learn, z, 0.0))
