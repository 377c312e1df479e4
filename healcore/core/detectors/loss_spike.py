"""Loss spike: one bad batch, or a sustained departure from the recent level.

Scale-free and shift-free: a loss may be negative, near zero or constant. The level is a moving
average that follows falls faster than rises; the scale is the mean absolute residual of accepted
values. An outlying value teaches the level at a fraction of the weight, until so many have come
in a row that they are the level.

`alarm` is one outlying step (worth a skip). `sustained` is evidence that adds up: the sum of
(min(z, z_cap) - z_drift), never below zero, above `evidence` (Page's CUSUM, 1954).
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

    z_threshold: Any = 8.0
    """Scales above the level at which one step is an outlier."""
    z_drift: Any = 3.5
    """Evidence grows above this score and shrinks below it."""
    z_cap: Any = 8.0
    """One step adds at most `z_cap - z_drift`."""
    evidence: Any = 9.0
    """Evidence of a sustained spike."""
    warmup_steps: Any = 25
    """Steps learnt before anything is called a spike."""
    escape: Any = 50
    """Outlying steps in a row after which they are learnt like any other."""


class State(NamedTuple):
    """O(1) memory."""

    count: Any
    level: Any
    scale: Any
    evidence: Any
    run: Any


def init(config: Config) -> State:
    """No step seen."""
    del config
    zero, none = np.zeros((), np.float32), np.zeros((), np.int32)
    return State(none, zero, zero.copy(), zero.copy(), none.copy())


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss`, then learns it."""
    learn, loss = seen.sound, seen.loss
    count = xp.where(seen.restart, 0, state.count)
    first, warm = count == 0, count < config.warmup_steps
    gap = loss - state.level
    floor = numerics.larger(1e-6 * xp.abs(state.level), 1e-12, xp=xp)
    scale = numerics.larger(state.scale, floor, xp=xp)
    z = xp.where(warm, 0.0, gap / scale)
    out = learn & ~warm & (z > 3.0)
    alarm = learn & ~warm & (z > config.z_threshold)
    gained = numerics.smaller(z, config.z_cap, xp=xp) - config.z_drift
    evidence = xp.where(seen.restart | warm, 0.0, state.evidence)
    evidence = xp.where(learn & ~warm, evidence + gained, evidence)
    evidence = xp.where(evidence > 0, numerics.smaller(evidence, 1e6, xp=xp), 0.0)
    sustained = learn & (evidence > config.evidence)

    run = xp.where(learn, xp.where(out, state.run + 1, 0), state.run)
    outlying = out & (run <= config.escape)
    step = loss - state.level
    step = xp.where(outlying, 0.03 * step, xp.where(gap < 0, 0.3 * step, 0.1 * step))
    seen_count = xp.where(learn & warm, count + 1, count)
    divisor = numerics.as_float(xp.where(seen_count > 0, seen_count, 1), xp=xp)
    level = state.level + xp.where(learn, step, 0.0)
    level = numerics.settle(xp.where(first & learn, loss, level), xp=xp)
    off = xp.where(first, 0.0, xp.abs(gap))
    base = xp.where(first, 0.0, state.scale)
    step = off - base
    accept = learn & ~outlying
    new_scale = base + xp.where(accept, xp.where(warm, step / divisor, 0.02 * step), 0.0)
    new_scale = numerics.settle(new_scale, xp=xp)
    run = xp.where(run > 2 * config.escape, 2 * config.escape, run)
    cause = flag(alarm | sustained, Cause.LOSS_SPIKE, xp=xp)
    new = State(seen_count, level, new_scale, evidence, run)
    return new, Reading(alarm | sustained, sustained, cause, z)
