"""Spike: one outlier, or several within a short time, of a loss or a norm (docs/detectors.md).

The level falls at once to the higher of two successive values and rises slowly. A value above the
threshold is an outlier. The threshold is learnt: a streaming quantile (Robbins and Monro, 1951) of
the run's own values, so that recurring outliers become noise. Each value has a vote between 0 and
1: a full vote is an `alarm`, a faded sum of votes above `evidence` is `sustained`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.detectors import noise

LEARN = 0.2  # a full vote raises the threshold by this share
OUTLIERS = 1.0 / 256.0  # mean vote at which the threshold settles
LASTS = 2  # windows of a sustained spike after which its level is the level
LOWEST = 0.5  # share of `z_threshold` below which the threshold does not fall


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    z_threshold: Any = 5.5
    """Height above the level, in units of the noise, at which a value begins to be an outlier, and
    at twice which its vote is full. The learnt threshold starts here, see `LOWEST`."""
    evidence: Any = 2.0
    """Votes above which a spike is sustained."""
    window: Any = noise.WINDOW
    """Values learnt before any is judged. Afterwards the weight of a value is 1 / window."""
    min_noise: Any = noise.SMALL
    """Noise taken at least, as a share of the level."""


class State(NamedTuple):
    """The level, the threshold and the votes."""

    values: noise.NoiseState
    level: Any  # float32
    threshold: Any  # float32: in units of the noise, learnt from the run's own outliers
    votes: Any  # float32: faded sum of the votes
    lasting: Any  # int32: values since the spike became sustained, 0 = it is not


class Spike(NamedTuple):
    """The result for one value."""

    alarm: Any
    sustained: Any
    z: Any  # float32: height above the level in units of the noise


def init(config: Any) -> State:
    """No value seen."""
    del config
    zero = np.zeros((), np.float32)
    return State(noise.init(), zero, zero.copy(), zero.copy(), np.zeros((), np.int32))


def update(
    config: Any, state: State, value: Any, learn: Any, restart: Any, *, xp: Any
) -> tuple[State, Spike]:
    """Judges `value` (float32, finite where `learn` holds), then learns it."""
    values = noise.begin(state.values, value, restart, xp=xp)
    first, warm = values.count == 0, values.count < config.window
    level = xp.where(first, value, state.level)
    start = value - value + config.z_threshold
    threshold = xp.where(first, start, state.threshold)
    votes = xp.where(first, 0.0, state.votes)
    lasting = xp.where(first, 0, state.lasting)
    before = State(values, level, threshold, votes, lasting)

    unit = noise.unit(values, level, config.min_noise, xp=xp)
    known = unit > 0
    gap = value - level
    z = numerics.quotient(gap, xp.where(known, unit, 1.0), xp=xp)
    z = xp.where(known & ~warm, z, 0.0)
    vote = numerics.quotient(z - threshold, threshold, xp=xp)
    vote = xp.where(vote > 0, xp.where(vote < 1, vote, 1.0), 0.0)

    most = xp.where(known, numerics.product(threshold, unit, xp=xp), numerics.HUGE)
    values, weight = noise.learn(values, value, most, config.window, xp=xp)
    votes = votes - numerics.product(weight, votes, xp=xp) + vote
    votes = numerics.smaller(votes, vote - vote + 1.0 + config.evidence, xp=xp)
    sustained = votes > config.evidence
    lasting = xp.where(sustained, lasting + 1, 0)
    escaped = lasting >= LASTS * config.window

    rise = numerics.product(weight, numerics.smaller(gap, most, xp=xp), xp=xp)
    pair = numerics.larger(value, before.values.last, xp=xp)
    level = xp.where(gap > 0, level + rise, numerics.smaller(level, pair, xp=xp))
    factor = LEARN * (vote - OUTLIERS)
    learnt = threshold + numerics.product(threshold, factor, xp=xp)
    learnt = numerics.larger(learnt, LOWEST * start, xp=xp)
    after = State(
        values,
        numerics.settle(xp.where(escaped, value, level), xp=xp),
        xp.where(warm | sustained, threshold, learnt),
        numerics.settle(xp.where(escaped, 0.0, votes), xp=xp),
        xp.where(escaped, 0, lasting),
    )
    alarm, sustained = learn & (vote >= 1), learn & sustained & (vote > 0)
    return _choose(learn, after, before, xp=xp), Spike(alarm, sustained, z)


def _choose(learn: Any, after: State, before: State, *, xp: Any) -> State:
    """The state `after` where `learn` holds, else the one `before`."""
    pairs = zip(after.values, before.values, strict=True)
    values = noise.NoiseState(*(xp.where(learn, a, b) for a, b in pairs))
    rest = zip(after[1:], before[1:], strict=True)
    return State(values, *(xp.where(learn, a, b) for a, b in rest))
