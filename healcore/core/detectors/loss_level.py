"""The level of a loss and its noise, at two time scales each, against which a spike is measured."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics

# Ranges: values that serve as well (docs/detectors.md).
_FALL = 0.33  # weight of a fall in the level: learnt almost at once; 0.25 to 0.5
_RISE = 0.05  # weight of a rise; 0.04 to 0.08
_NOISE = 0.04  # weight in the fast noise scale; 0.02 to 0.05
_REPEAT = 0.25  # share of it for a residual that repeats the sign of the last; 0.1 to 0.4
_WINSOR = 3.5  # a residual counts at most this many units; 2.5 to 4
_LONG_SHARE = 0.95  # the long noise scale counts this much; 0.7 to 1.05
_LONG_START = 2.5  # its weight is this over the count ...; 1.5 to 4
_LONG = 1.0 / 512.0  # ... and not below this; 1/256 to 1/1024
_SLOW_FALL = 0.1  # the slow level; 0.08 to 0.2
_SLOW_RISE = 0.01  # 0.005 to 0.015
_CLIMB_WINSOR = 2.0  # a level above the slow one counts at most this many wanders; 1.5 to 2.5
_LAG = 0.5  # share of what the slow level is behind a falling one; 0.25 to 0.5
_WANDER_SHARE = 0.3  # the level's wander is at least this much of the noise; 0.2 to 0.35
_NOW = 0.1  # weight in the running mean of what is seen, spike or not
_GRID_SHARE = 0.5  # the unit is at least this much of the grid; 0.3 to 0.8

# Noise below this share of the level is float32 rounding, that is, no noise is known ...
_ROUNDING = 2.0**-18
# ... and then the unit is this share of it: +0.01 % is nothing, a doubling is a vote.
_BLANK = 2.0**-10
# The smallest change ever seen is the grid of a rounded log (bf16, two digits), up to this share.
_COARSE = 2.0**-5
_COUNTED = 1 << 22  # exact as a float32, and far beyond where any weight still changes


class LevelState(NamedTuple):
    """Levels and noise of a loss."""

    count: Any  # int32: steps learnt
    mean: Any  # float32: the level; follows falls fast and rises slowly
    noise: Any  # float32: mean absolute residual of the last steps
    long_noise: Any  # float32: mean absolute residual of the whole run, recent steps weighing more
    residual: Any  # float32: the last residual, for its sign
    slow: Any  # float32: the slow level
    wander: Any  # float32: mean absolute distance of the level from the slow one
    now: Any  # float32: running mean of the losses, spikes included; the level to restart from
    last: Any  # float32: the last loss
    grid: Any  # float32: smallest change from one loss to the next that was not 0; 0 = none yet


def init() -> LevelState:
    """No step seen."""
    zero = np.zeros((), np.float32)
    return LevelState(np.zeros((), np.int32), *(zero.copy() for _ in range(9)))


def begin(state: LevelState, loss: Any, restart: Any, *, xp: Any) -> LevelState:
    """The state before this step; at the first, or after a restart, the level is the loss."""
    count = xp.where(restart, 0, state.count)
    first = count == 0
    return state._replace(
        count=count,
        mean=xp.where(first, loss, state.mean),
        slow=xp.where(first, loss, state.slow),
        now=xp.where(first, loss, state.now),
        last=xp.where(first, loss, state.last),
    )


def unit(state: LevelState, *, xp: Any) -> tuple[Any, Any, Any]:
    """The noise as a unit, whether there is one, and whether the history is constant.

    A loss that has always been exactly 0 has no unit: its first departure is not judged.
    """
    scale = numerics.larger(state.noise, _LONG_SHARE * state.long_noise, xp=xp)
    size = xp.abs(state.mean)
    blank = scale <= _ROUNDING * size
    scale = xp.where(blank, _BLANK * size, scale)
    grid = numerics.smaller(state.grid, _COARSE * size, xp=xp)
    scale = numerics.larger(scale, _GRID_SHARE * grid, xp=xp)
    return scale, scale > 0, blank


def elevation(state: LevelState, scale: Any, known: Any, *, xp: Any) -> Any:
    """How far the level is above the slow one, in units of its wander."""
    wander = numerics.larger(state.wander, _WANDER_SHARE * scale, xp=xp)
    return numerics.quotient(state.mean - state.slow, xp.where(known, wander, 1.0), xp=xp)


def learn(
    state: LevelState,
    loss: Any,
    scale: Any,
    judged: Any,
    warm: Any,
    blank: Any,
    incident: Any,
    over: Any,
    finite: Any,
    *,
    xp: Any,
) -> LevelState:
    """Learns one judged loss (finite), which was judged by `scale` if that was known (`judged`).

    `warm`: plain means. `blank`: the history is constant. `incident`: inside a sustained spike,
    rises teach nothing. `over`: the incident ends here, and the level restarts at the running mean.
    Where `finite` is false nothing is learnt.
    """
    one = loss - loss + 1.0
    after = numerics.as_float(state.count + 1, xp=xp)
    share = numerics.quotient(one, after, xp=xp)
    residual = loss - state.mean
    size = xp.abs(residual)
    most = _WINSOR * scale
    size = xp.where(judged & (size > most), most, size)
    rise = residual > 0

    # A fall that repeats is learnt in full, however deep; a single one is cut like a rise.
    fall = xp.where(state.residual > 0, -size, residual)
    weight = xp.where(rise, xp.where(incident, 0.0, _RISE * one), _FALL)
    weight = xp.where(warm, numerics.larger(weight, share, xp=xp), weight)
    mean = state.mean + numerics.product(weight, xp.where(rise, size, fall), xp=xp)

    teaches = ~(incident & rise)
    repeats = (rise == (state.residual > 0)) & (size > state.noise)
    weight = xp.where(repeats, _NOISE * _REPEAT, _NOISE * one)
    weight = xp.where(warm, numerics.larger(share, _NOISE, xp=xp), weight)
    shock = blank & ~warm  # the first noise ever seen is the unit
    weight = xp.where(shock, 1.0, weight)
    step = numerics.product(weight, size - state.noise, xp=xp)
    noise = state.noise + xp.where(teaches, step, 0.0)

    long = numerics.smaller(_LONG_START * share, 1.0, xp=xp)
    long = numerics.larger(long, _LONG, xp=xp)
    weight = xp.where(shock, 1.0, long)
    step = numerics.product(weight, size - state.long_noise, xp=xp)
    long_noise = state.long_noise + xp.where(teaches, step, 0.0)

    gap = mean - state.slow
    weight = xp.where(gap < 0, _SLOW_FALL * one, _SLOW_RISE)
    step = numerics.product(weight, gap, xp=xp)
    slow = xp.where(warm, mean, state.slow + xp.where(incident, 0.0, step))
    # A climb may not raise the unit that it is judged by, and a fall is no wander: with 3.5 and 1
    # here, a climb of 30 steps soon after a steep fall was missed.
    most = xp.where(gap > 0, _CLIMB_WINSOR * one, _WINSOR)
    most = most * numerics.larger(state.wander, _WANDER_SHARE * scale, xp=xp)
    off = xp.abs(gap)
    off = xp.where((gap < 0) & ~rise, _LAG * off, off)
    off = xp.where(judged & (off > most), most, off)
    step = numerics.product(long, off - state.wander, xp=xp)
    wander = state.wander + xp.where(incident, 0.0, step)

    weight = numerics.larger(share, _NOW, xp=xp)
    now = state.now + numerics.product(weight, loss - state.now, xp=xp)
    jump = xp.abs(loss - state.last)
    finer = (jump > 0) & ((state.grid == 0) | (jump < state.grid))
    count = xp.where(state.count < _COUNTED, state.count + 1, state.count)
    new = LevelState(
        count=count,
        mean=xp.where(over, now, mean),
        noise=noise,
        long_noise=long_noise,
        residual=residual,
        slow=xp.where(over, now, slow),
        wander=wander,
        now=now,
        last=loss,
        grid=xp.where(finer, jump, state.grid),
    )
    learnt = [xp.where(finite, after, before) for after, before in zip(new, state, strict=True)]
    return LevelState(learnt[0], *(numerics.settle(value, xp=xp) for value in learnt[1:]))
