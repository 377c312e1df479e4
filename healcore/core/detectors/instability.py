"""Instability: loss and gradient norm grow together from update to update.

A loss far above its level means a damaged model or different data, and this detector finds only the
first. Different data are there at once, and then the loss falls as they are learnt. A model damaged
by its own updates sets record after record, with a gradient norm many times its usual size.

A record is a loss of two steps in a row (one bad batch is none) that is above the last record by
the factor `growth`, both measured from the run's best level; one above it by `growth` squared
counts twice, by its third power three times. After an alarm, which may have cut the learning rate,
only what is above the records before it counts: a loss that is noisy at a new level does not grow.

A loss that changes by design may grow from step to step too: a new term whose weight is raised, a
longer roll-out. But its first step has no cause in the run, while a model that is about to break
has had larger norms before its loss, or a learning rate that was raised. So without either an alarm
needs a growth that no ramp has.
docs/detectors.md has the first record and the end of a growth.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading, flag

NEEDS = frozenset({"loss", "grad_norm"})

_LEVEL = 0.125  # weight of a loss in its level and in the noise: about the last 15 steps count
_NORM = 0.03125  # weight of a norm in its usual size
_WINSOR = 3.0  # a norm counts at most this many times the usual, a residual so many times the noise
_NOISE = 4.0  # a rise below this many times the noise is none
_SHARE = 0.5  # the same for this share of the level's size: a smooth loss has no noise
# Times the patience: a loss that has stayed high so long without a record is the level, and so is
# one that has been above its level for twice as long. Noise sets records on a plateau.
_SETTLED = 4
_BACK = 0.25  # of the last record: below it the growth is over
# Times `norm_ratio`, for more growth before the loss is at its level again: after a change of the
# data norms are larger for a while. In healthy runs 1.5 was seen, in those with a rate that is too
# high 3 and more.
_AGAIN = 2.0
# Steps learnt, before which one more record is needed: a level known from a few steps is not known
# well. A healthy run climbed to five times its loss from step 8 on and was back at step 19. An
# explosion may overflow three steps after its first sign, so steep records count three times.
_EARLY = 16
# Times the usual size of the norm. Before the loss of a model that breaks (a learning rate 3 to 30
# times the best) the largest of the last norms was 2.2 to 100 times it, before a ramp 0.4 to 1.9.
_RISEN = 2.0
RAISED = 1.02
"""Times its average of about the last 30 steps: a learning rate above it has just been raised, in a
jump or a linear warm-up up to step 1,500."""
_AWAY = 8.0  # times the noise above its level the loss has left it
_FADE = 0.875  # of the largest norm per step: about the last ten count
_RAMP = 2.0  # times the first height and the square of the steps since: faster than a square
_FORGET = 1.0 / 512.0  # rate at which best and highest level are forgotten: a level shift is learnt
_COUNTED = 1 << 22  # exact as a float32, and far beyond where any weight still changes


class Config(NamedTuple):
    """Thresholds; numbers may be arrays."""

    growth: Any = 1.4
    """Factor from one record to the next, above 1."""
    records: Any = 3
    """Records that make the alarm, the first one included; one more in the first 16 steps."""
    norm_ratio: Any = 8.0
    """Multiple of its usual size that the gradient norm has at a record."""
    patience: Any = 16
    """Steps without a record after which the growth is over."""
    warmup_steps: Any = 4
    """Steps learnt before a record counts."""


class State(NamedTuple):
    """Levels, noise and the records."""

    count: Any  # int32: steps learnt
    level: Any  # float32: smoothed loss
    best: Any  # float32: lowest level
    top: Any  # float32: highest level before the growth began
    noise: Any  # float32: mean absolute residual
    last: Any  # float32: the last loss
    norm: Any  # float32: usual size of the gradient norm
    last_norm: Any  # float32: the last gradient norm
    record: Any  # float32: the last record, from `best`; 0 once the loss is at its level again
    records: Any  # int32: records of the growth in progress
    since: Any  # int32: steps since the last record
    rate: Any  # float32: usual learning rate, 0 if it is not known
    recent: Any  # float32: the largest gradient norm lately
    before: Any  # float32: the same before loss and norm left their levels
    begun: Any  # float32: height of the first loss since then
    above: Any  # int32: steps since then
    alarmed: Any  # int32: 1 from an alarm until the loss is at its level again


def init(config: Config) -> State:
    """No step seen."""
    del config
    zero, none = np.zeros((), np.float32), np.zeros((), np.int32)
    floats = (zero.copy() for _ in range(8))
    return State(
        none,
        *floats,
        records=none.copy(),
        since=none.copy(),
        rate=zero.copy(),
        recent=zero.copy(),
        before=zero.copy(),
        begun=zero.copy(),
        above=none.copy(),
        alarmed=none.copy(),
    )


def update(config: Config, state: State, seen: Observed, *, xp: Any) -> tuple[State, Reading]:
    """Judges loss and norm against the run so far, then learns them."""
    learn, loss, norm = seen.finite, seen.loss, seen.grad_norm
    count = xp.where(seen.restart, 0, state.count)
    first = count == 0
    level, best, top = (
        xp.where(first, loss, each) for each in (state.level, state.best, state.top)
    )
    usual = xp.where(first, norm, state.norm)
    noise = xp.where(first, 0.0, state.noise)
    records = xp.where(first, 0, state.records)
    last = xp.where(first, 0.0, state.record)

    lower = xp.where(first | (loss < state.last), loss, state.last)
    height = lower - best
    least = numerics.larger(top - best, _SHARE * xp.abs(best), xp=xp)
    least = numerics.larger(least, _NOISE * noise, xp=xp)
    large = config.norm_ratio * usual
    large = xp.where((last > 0) & (records == 0), _AGAIN * large, large)
    grows = (norm > large) & (state.last_norm > large) & ~first
    alarmed = xp.where(last > 0, state.alarmed, 0)
    grown = numerics.product(config.growth, last, xp=xp)
    # Always so, a break that begins with a single leap would be missed.
    higher = xp.where((records > 0) | (alarmed > 0), grown, least)
    record = learn & (count >= config.warmup_steps) & grows & (height > higher)
    back = height < numerics.product(_BACK, last, xp=xp)
    over = ~record & (back | (state.since >= config.patience))
    high = height > least
    second = numerics.product(config.growth, higher, xp=xp)
    third = numerics.product(config.growth, second, xp=xp)
    steep = xp.where(height > third, records + 3, records + 2)
    counted = xp.where((records > 0) & (height > second), steep, records + 1)
    records = xp.where(record, counted, xp.where(over, 0, records))
    needed = xp.where(count < _EARLY, 1, records - records) + config.records
    risen = _RISEN * usual
    # By its own noise: `least` may still hold what the run has improved since its start.
    away = ~first & (loss - level > _AWAY * noise) & (norm > risen)
    # It does not start again where the loss has fallen in between: noise on a new level would be a
    # growth.
    above = xp.where(away, state.above + 1, 0)
    begun = xp.where(above == 1, loss - best, state.begun)
    recent = xp.where(first, norm, numerics.larger(norm, _FADE * state.recent, xp=xp))
    before = xp.where(above == 0, recent, state.before)
    ramp = numerics.product(_RAMP * numerics.as_float(above * above, xp=xp), begun, xp=xp)
    sudden = (count >= _EARLY) & (before <= risen)
    rate = state.rate
    if seen.learning_rate is not None:
        rate = xp.where(first, seen.learning_rate, rate)
        sudden = sudden & (seen.learning_rate <= RAISED * rate)
        rate = rate + numerics.product(_NORM, seen.learning_rate - rate, xp=xp)
    alarm = record & (records >= needed) & ~(sudden & (height <= ramp))
    z = numerics.quotient(height, xp.where(least > 0, least, 1.0), xp=xp)

    one = loss - loss + 1.0
    share = numerics.quotient(one, numerics.as_float(count + 1, xp=xp), xp=xp)
    # High losses are not learnt, unless they stay high for long without growing.
    settled = high & ~record & (state.since >= _SETTLED * config.patience)
    settled = settled | (above >= 2 * _SETTLED * config.patience)
    learns = (records == 0) & ~high
    weight = numerics.larger(share, _LEVEL, xp=xp)
    residual = loss - level
    size = xp.abs(residual)
    size = numerics.smaller(size, xp.where(noise > 0, _WINSOR * noise, size), xp=xp)
    # A fall is learnt in full, a rise as far as the noise allows: one outlier is no level.
    residual = xp.where(residual > 0, size, residual)
    step = numerics.product(weight, residual, xp=xp)
    level = level + xp.where(learns, step, 0.0)
    step = numerics.product(weight, size - noise, xp=xp)
    noise = noise + xp.where(learns, step, 0.0)
    size = numerics.smaller(norm, xp.where(usual > 0, _WINSOR * usual, norm), xp=xp)
    step = numerics.product(numerics.larger(share, _NORM, xp=xp), size - usual, xp=xp)
    usual = usual + xp.where(learns, step, 0.0)
    best = best + numerics.product(_FORGET, level - best, xp=xp)
    best = xp.where(level < best, level, best)
    top = top + numerics.product(_FORGET, level - top, xp=xp)
    top = xp.where(learns & (level > top), level, top)

    last = xp.where(record, height, xp.where(high | (records > 0), last, 0.0))
    floats = (level, best, top, noise, loss, usual, norm, last)
    after = State(
        xp.where(settled, 0, xp.where(count < _COUNTED, count + 1, count)),
        *(numerics.settle(each, xp=xp) for each in floats),
        # Another alarm needs records beyond this one.
        records=xp.where(alarm, 1, records),
        since=xp.where(record | settled, 0, xp.where(high | (records > 0), state.since + 1, 0)),
        rate=numerics.settle(rate, xp=xp),
        recent=numerics.settle(recent, xp=xp),
        before=numerics.settle(before, xp=xp),
        begun=numerics.settle(begun, xp=xp),
        above=above,
        alarmed=xp.where(alarm, 1, alarmed),
    )
    kept = state._replace(count=count)
    new = State(*(xp.where(learn, a, b) for a, b in zip(after, kept, strict=True)))
    reading_z = xp.where(learn & (count >= config.warmup_steps), z, 0.0)
    return new, Reading(alarm, alarm, flag(alarm, Cause.INSTABILITY, xp=xp), reading_z)
