"""Loss spike: one bad batch, or a sustained departure from the run's own noise (docs/detectors.md).

Independent of the loss's scale, shift and cadence. Noise alternates and a spike persists: residuals
that repeat a sign count little in the noise, the unit of z. The threshold is learnt: a streaming
quantile (Robbins and Monro, 1951) where about one step in 256 is an outlier, so that heavy-tailed
and multi-domain losses need no switch. Each step has a vote between 0 and 1. A full vote is an
`alarm`, worth a skip. A faded sum above `evidence` is `sustained`, worth a rollback; steps below
the level take votes away, and the level's distance from a slower one adds some, for a small rise
that lasts. When an incident ends the level restarts at the loss of now: healed, or truly shifted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.detectors import loss_level
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss"})

# Ranges: values that serve as well (docs/detectors.md).
_SLOPE = 2.0  # a vote grows from 0 at the threshold to 1 at 1.5 times it; 1.3 to 2.8
_FADE = 0.95  # of the votes per step; 0.93 to 0.955
_SPARE = 0.5  # the sum stays below evidence + this; 0.3 to 1
_AGAINST = 3.0  # what a step far below the level takes away at most; 1.8 to 4.8
_AGAINST_FROM = 0.3  # of the threshold, below the level; 0.18 to 0.48
_OVER = 0.5  # votes at which an incident is over; 0.5 to 1
_LEARN = 0.2  # what one outlier adds to the tail factor; 0.12 to 0.35
_OUTLIERS = 1.0 / 256.0  # rate of outliers at which it settles; 1/200 to 1/600
_EARLY = 1.5  # the tail factor at first; 1.2 to 1.8
_LARGEST_TAIL = 8.0  # recurring outliers reach it, and then are noise; 6 to 16
_SLOW_VOTE = 0.4  # largest vote of the slow channel; 0.35 to 0.5
_SLOW_THRESHOLD = 5.0  # of the level above the slow one, in the level's own wander; 4 to 5.2
_SLOW_SLOPE = 1.0 / _SLOW_THRESHOLD  # the slow vote is full at twice that


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    z_threshold: Any = 3.75
    """Mean absolute residuals at which a step begins to be an outlier, before the learnt factor
    (3.75 are three standard deviations of Gaussian noise); full at 1.5 times it."""
    evidence: Any = 2.3
    """Votes that make a spike sustained: three full ones within a dozen steps."""
    warmup_steps: Any = 32
    """Steps learnt before anything is called a spike."""
    escape: Any = 64
    """Steps after which an incident ends and the loss of now is the level."""


class State(NamedTuple):
    """The level, the threshold and the votes."""

    level: loss_level.LevelState
    tail: Any  # float32: factor on the threshold, learnt from the run's own outliers
    votes: Any  # float32: faded sum of the votes
    incident: Any  # int32: steps since it became sustained, 0 = it is not


def init(config: Config) -> State:
    """No step seen."""
    del config
    zero = np.zeros((), np.float32)
    return State(loss_level.init(), zero, zero.copy(), np.zeros((), np.int32))


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges `seen.loss`, then learns it."""
    learn, loss = seen.finite, seen.loss
    level = loss_level.begin(state.level, loss, seen.restart, xp=xp)
    first, warm = level.count == 0, level.count < config.warmup_steps
    votes = xp.where(first, 0.0, state.votes)
    incident = xp.where(first, 0, state.incident)
    tail = xp.where(first, _EARLY, state.tail)

    unit, known, blank = loss_level.unit(level, xp=xp)
    judged = known & ~warm
    gap = loss - level.mean
    z = numerics.quotient(gap, xp.where(known, unit, 1.0), xp=xp)
    z = xp.where(judged, z, 0.0)
    score = numerics.quotient(z, config.z_threshold * tail, xp=xp)
    vote = _between(numerics.product(_SLOPE, score - 1.0, xp=xp), xp=xp)
    below = _between(numerics.product(_SLOPE, -_AGAINST_FROM - score, xp=xp), xp=xp)
    against = numerics.product(_AGAINST, below, xp=xp)
    was = incident > 0
    lasting = judged & ~was & (level.count > 3 * config.warmup_steps)
    above = loss_level.elevation(level, unit, known, xp=xp) - _SLOW_THRESHOLD
    slow = numerics.product(_SLOW_VOTE, _between(_SLOW_SLOPE * above, xp=xp), xp=xp)
    slow = xp.where(lasting, slow, 0.0)
    votes = numerics.product(_FADE, votes, xp=xp) + numerics.larger(vote, slow, xp=xp) - against
    votes = numerics.smaller(votes, config.evidence + _SPARE, xp=xp)
    votes = xp.where(votes > 0, votes, 0.0)
    lasts = learn & ((votes > config.evidence) | (was & (votes >= _OVER)))
    alarm = learn & (vote >= 1.0)
    # Not at steps that are at the level: an order after the loss has come back is worse than none.
    sustained = lasts & ((vote > 0) | (slow > 0))

    incident = xp.where(lasts, incident + 1, 0)
    escaped = incident >= config.escape
    over = learn & (escaped | (was & ~lasts))
    level = loss_level.learn(level, loss, unit, judged, warm, blank, lasts, over, learn, xp=xp)
    factor = _LEARN * (vote - _OUTLIERS)
    learnt = tail + numerics.product(tail, factor, xp=xp)
    learnt = numerics.smaller(numerics.larger(learnt, 1.0, xp=xp), _LARGEST_TAIL, xp=xp)
    tail = xp.where(warm | lasts, tail, learnt)
    new = State(
        level=level,
        tail=xp.where(learn | first, tail, state.tail),
        votes=numerics.settle(
            xp.where(learn, xp.where(escaped, 0.0, votes), xp.where(first, 0.0, state.votes)), xp=xp
        ),
        incident=xp.where(
            learn, xp.where(escaped, 0, incident), xp.where(first, 0, state.incident)
        ),
    )
    cause = flag(alarm | sustained, Cause.LOSS_SPIKE, xp=xp)
    return new, Reading(alarm, sustained, cause, xp.where(learn, z, 0.0), gap)


def _between(x: Any, *, xp: Any) -> Any:
    """Cut to [0, 1]."""
    return xp.where(x > 0, xp.where(x < 1, x, 1.0), 0.0)
