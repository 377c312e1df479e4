"""How much of its norm a spike keeps that comes alone, after a step without one (for `zclip`).

A class or a language that comes in batches of its own has spikes of the gradient norm, and those
are all that is seen of it: brought down to the mean it is hardly learnt. Garbage and heavy-tailed
noise come in single batches too. So a lone spike

* may reach earlier norms (`lone_ratio`), and more if its loss is an outlier too, so that the data
  and not the model explain it: what earlier steps have saved (`lone_share`), if it is not too far
  out (`lone_limit`), and at most twice the largest norm lately;
* may reach no more than earlier norms once one too far out has come and gone: garbage;
* is treated like any other spike while the losses of such batches do not fall. A class that is
  learnt comes with less each time, noise with as much as before.

Formulas and numbers: docs/detectors.md, docs/decisions/0014.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed

_FORGET = 1.0 / 1024.0  # of the largest norm per step; a power of two, so that the product is exact
_DOUBLE = 2.0  # a lone spike passes at most so many times the largest recent norm
_SAVED = 2.0  # limits that are saved up at most: after long without a spike one may be as far out
_ORDINARY, _OUTLYING = 1, 2  # of `State.spiked`: the loss of the last step, if it was a spike
_CAME, _GONE = 1, 2  # of `State.far`: the last step was such a spike; one has come and gone

# Whether the losses fall. Their average is slow, so that a slow fall shows; a loss counts at most
# twice the average, since those of heavy-tailed noise differ by factors of 20.
_LOSS_RATE = 1.0 / 16.0
_LOSS_MOST = 2.0
_HIGHER = 1.125  # times the average is higher; in between is neither, the noise of one kind of data
_LOWER, _MISS = 1, 3  # what a lower and a higher loss count: noise gives about as many of both
_BEST, _WORST = 2, -6  # where the count starts and ends; below 0 a lone spike is like any other


class State(NamedTuple):
    """What earlier steps allow."""

    peak: Any  # float32: largest norm that has passed, slowly forgotten
    spiked: Any  # int32: whether the last norm was a spike: 0 no, _ORDINARY, _OUTLYING
    saved: Any  # float32: what lone spikes may use, in means
    far: Any  # int32: lone spike beyond `lone_limit`, its loss an outlier: 0 none, _CAME, _GONE
    excess: Any  # float32: average of the loss above its level at lone spikes; 0: none yet
    falls: Any  # int32: how far those losses fall, _WORST to _BEST


class Allowance(NamedTuple):
    """What a spike may keep at this step."""

    norm: Any  # float32: up to here, if `lone`
    lone: Any  # bool: no spike came before it
    beyond: Any  # bool: it is too far out, and its loss an outlier


def init() -> State:
    """No step seen."""
    zero, none = np.zeros((), np.float32), np.zeros((), np.int32)
    best = np.full((), _BEST, np.int32)
    return State(zero, none, zero.copy(), none.copy(), zero.copy(), best)


def allow(
    config: Any,
    state: State,
    seen: Observed,
    spike: Any,
    mean: Any,
    warm: Any,
    first: Any,
    *,
    xp: Any,
) -> tuple[State, Allowance]:
    """The state with this step's share and loss, and what the step may keep if it is a spike.

    Args:
        config: a `ZClipConfig`.
        state: memory.
        seen: signals of the step.
        spike: bool: the norm is a spike.
        mean: float32: usual norm.
        warm: bool: the mean is not known yet.
        first: bool: nothing has been learnt, or a change was expected.
        xp: the array namespace.
    """
    norm, outlier = seen.grad_norm, seen.loss_outlier
    peak = xp.where(first, 0.0, state.peak)
    saved = xp.where(warm, 0.0, state.saved + config.lone_share)
    saved = numerics.smaller(saved, _SAVED * config.lone_limit, xp=xp)
    far = xp.where(first, 0, state.far)
    excess, falls = xp.where(first, 0.0, state.excess), xp.where(first, _BEST, state.falls)
    allowed = numerics.product(config.lone_ratio, peak, xp=xp)
    lone, beyond = state.spiked == 0, spike & False
    if outlier is not None:
        judged = spike & lone & outlier
        excess, falls = _losses(excess, falls, seen.loss_excess, judged, xp=xp)
        # A small spike with an ordinary loss does not use up the turn of the batch after it.
        lone = lone | (outlier & (state.spiked == _ORDINARY))
        reach = numerics.larger(saved, config.lone_limit, xp=xp)
        near = norm <= numerics.product(reach, mean, xp=xp)
        beyond = outlier & ~near
        doubled = numerics.product(_DOUBLE, peak, xp=xp)
        more = numerics.smaller(numerics.product(saved, mean, xp=xp), doubled, xp=xp)
        allowed = numerics.larger(allowed, xp.where(near & outlier, more, 0.0), xp=xp)
        within = numerics.smaller(allowed, peak, xp=xp)
        allowed = xp.where(beyond & (far == _GONE), within, allowed)
        allowed = xp.where(falls >= 0, allowed, 0.0)
    state = State(peak, state.spiked, saved, far, excess, falls)
    return state, Allowance(numerics.smaller(allowed, norm, xp=xp), lone, beyond)


def learn(
    before: State,
    state: State,
    allowance: Allowance,
    seen: Observed,
    spike: Any,
    kept: Any,
    passed: Any,
    mean: Any,
    learns: Any,
    *,
    xp: Any,
) -> State:
    """Learns the step.

    Args:
        before: memory as it was before the step, which stays where `learns` is false.
        state: memory as `allow` has left it.
        allowance: of this step.
        seen: signals of the step.
        spike: bool: the norm is a spike.
        kept: bool: it is, and was brought down to the allowance, not to the rule's target.
        passed: float32: the norm after clipping.
        mean: float32: usual norm.
        learns: bool: the step is learnt.
        xp: the array namespace.
    """
    faded = state.peak - _FORGET * state.peak
    used = numerics.quotient(allowance.norm, xp.where(kept, mean, 1.0), xp=xp)
    saved = numerics.larger(xp.where(kept, state.saved - used, state.saved), 0.0, xp=xp)
    none = state.far - state.far
    gone = (state.far == _GONE) | ((state.far == _CAME) & ~spike)
    came = ~gone & kept & allowance.beyond
    spiked = xp.where(spike, _ORDINARY, none)
    if seen.loss_outlier is not None:
        spiked = xp.where(spike & seen.loss_outlier, _OUTLYING, spiked)
    after = state._replace(
        peak=numerics.larger(faded, passed, xp=xp),
        spiked=spiked,
        saved=saved,
        far=xp.where(gone, _GONE, xp.where(came, _CAME, none)),
    )
    new = State(*(xp.where(learns, a, b) for a, b in zip(after, before, strict=True)))
    return State(
        peak=numerics.settle(new.peak, xp=xp),
        spiked=xp.astype(new.spiked, xp.int32),
        saved=numerics.settle(new.saved, xp=xp),
        far=xp.astype(new.far, xp.int32),
        excess=numerics.settle(new.excess, xp=xp),
        falls=xp.astype(new.falls, xp.int32),
    )


def _losses(average: Any, falls: Any, excess: Any, judged: Any, *, xp: Any) -> tuple[Any, Any]:
    """Average and count with one more loss, where `judged`."""
    first = average == 0
    most = numerics.smaller(excess, _LOSS_MOST * average, xp=xp)
    moved = average + _LOSS_RATE * (most - average)
    higher = xp.where(excess > _HIGHER * average, falls - _MISS, falls)
    counted = xp.where(excess <= average, falls + _LOWER, higher)
    counted = xp.where(counted > _BEST, _BEST, xp.where(counted < _WORST, _WORST, counted))
    return (
        xp.where(judged, xp.where(first, excess, moved), average),
        xp.where(judged & ~first, counted, falls),
    )
