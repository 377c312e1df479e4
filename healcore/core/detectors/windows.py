"""Detectors that compare a value with the last values of the run.

The values are in a ring of fixed size. A running sum would keep every rounding error, and one value
of 1e15 would wipe out all others for good. `xp.sum` has another order in each backend. So the ring
is as long as a power of two and is folded in half: the same additions everywhere, with the error of
a pairwise sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading


class Window(NamedTuple):
    """A ring of fixed size."""

    values: Any  # float32 (a power of two,): the last values; 0 in an empty slot
    place: Any  # int32: slot of the next value
    count: Any  # int32: values held, up to the window's length


def empty(length: int) -> Window:
    """An empty window of `length` values."""
    slots = 1 << (length - 1).bit_length()
    none = np.zeros((), np.int32)
    return Window(np.zeros((slots,), np.float32), none, none.copy())


def cleared(window: Window, when: Any, *, xp: Any) -> Window:
    """The window, empty where `when` holds."""
    return Window(
        xp.where(when[..., None], 0.0, window.values),
        xp.where(when, 0, window.place),
        xp.where(when, 0, window.count),
    )


def push(window: Window, length: int, value: Any, learn: Any, *, xp: Any) -> Window:
    """Writes `value` over the oldest one where `learn` holds; `length` is as in `empty`."""
    slots = window.values.shape[-1]
    here = (xp.arange(slots) == window.place[..., None]) & learn[..., None]
    after = window.place + 1
    return Window(
        xp.where(here, value[..., None], window.values),
        xp.where(learn, xp.where(after < length, after, 0), window.place),
        xp.where(learn & (window.count < length), window.count + 1, window.count),
    )


def mean(window: Window, *, xp: Any) -> Any:
    """Mean of the values; 0 for an empty window."""
    divisor = numerics.as_float(xp.where(window.count > 0, window.count, 1), xp=xp)
    return numerics.quotient(total(window.values), divisor, xp=xp)


def variance(window: Window, mean: Any, bessel: bool, *, xp: Any) -> Any:
    """Mean square of the deviations from `mean`; a running sum of squares loses it in rounding."""
    slots = window.values.shape[-1]
    there = xp.arange(slots) < window.count[..., None]
    off = xp.where(there, window.values - mean[..., None], 0.0)
    squares = numerics.settle(numerics.product(off, off, xp=xp), xp=xp)
    several = window.count > (1 if bessel else 0)
    divisor = xp.where(several, window.count - 1 if bessel else window.count, 1)
    return numerics.quotient(total(squares), numerics.as_float(divisor, xp=xp), xp=xp)


def total(values: Any) -> Any:
    """Sum along the last axis, a power of two, in one order for all backends."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def largest(values: Any, *, xp: Any) -> Any:
    """Maximum along the last axis, a power of two."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = numerics.larger(values[..., :half], values[..., half:], xp=xp)
    return values[..., 0]


class LossRatioState(NamedTuple):
    """The window, and the outliers in a row."""

    window: Window
    last: Any  # float32: last accepted loss
    run: Any  # int32: outliers in a row, up to `escape`


class LossRatioConfig(NamedTuple):
    """A loss that is several times the mean of the last losses.

    The rule of Lightning's `SpikeDetection` (three times the mean of 10), llm-foundry's
    `KillLossSpike` (twice the mean of the window, five in a row) and the self-healing callback for
    TRL (five times the mean of 100), for the recipes: `loss_spike` uses the run's noise and finds
    far more.

    Differs from them (docs/recipes.md): only finite, accepted losses enter the window, and after
    `escape` outliers in a row it restarts at the present loss. While a loss in the window is
    negative, or half of them are 0, an outlier is `ratio` times the largest size in a full window
    away from the mean: the noise of a loss around zero (GRPO) is no spike, and a window of zeros
    judges nothing.
    """

    ratio: Any = 2.0
    """Multiple of the mean of the last losses at which a loss is an outlier; above 1."""
    window: int = 100
    """How many accepted losses count. Static: it is the length of an array in the state."""
    warmup_steps: Any = 25
    """Losses learnt before one is judged; at most `window`."""
    sustain: Any = 5
    """Outliers in a row that make it sustained."""
    escape: Any = 25
    """Outliers in a row after which the window restarts at the present loss."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})

    def init(self) -> LossRatioState:
        """No step seen."""
        return LossRatioState(empty(self.window), np.zeros((), np.float32), np.zeros((), np.int32))

    def update(
        self, state: LossRatioState, seen: Observed, *, xp: Any
    ) -> tuple[LossRatioState, Reading]:
        """Judges `seen.loss` against the window, then learns it if accepted."""
        learn, loss = seen.finite, seen.loss
        held = cleared(state.window, seen.restart, xp=xp)
        usual = mean(held, xp=xp)
        negative = xp.sum(xp.astype(held.values < 0, xp.int32), axis=-1)
        positive = xp.sum(xp.astype(held.values > 0, xp.int32), axis=-1)
        plain = (negative == 0) & (2 * positive > held.count)
        level = xp.where(plain, usual, largest(xp.abs(held.values), xp=xp))

        known = (held.count > 0) & (held.count >= self.warmup_steps) & (level > 0)
        known = known & (plain | (held.count >= self.window))
        needed = numerics.product(self.ratio, level, xp=xp)
        far = xp.where(plain, loss, loss - usual) >= needed
        alarm = learn & known & far & (loss > state.last)

        run = xp.where(seen.restart, 0, state.run)
        run = xp.where(learn, xp.where(alarm, run + 1, 0), run)
        sustained = alarm & (run >= self.sustain)
        escaped = alarm & (run >= self.escape)
        taught = learn & (~alarm | escaped)
        held = cleared(held, escaped, xp=xp)
        held = push(held, self.window, loss, taught, xp=xp)
        last = xp.where(taught, loss, state.last)
        new = LossRatioState(held, last, xp.where(escaped, 0, run))
        return new, Reading(alarm, sustained)


class WindowState(NamedTuple):
    """The window, and the outliers in a row."""

    window: Window
    run: Any  # int32: outliers in a row, up to `sustain`


class LossWindowConfig(NamedTuple):
    """A loss many standard deviations above the mean of the last losses.

    The rule of OLMo's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py), Levanter's
    `SkipStepConfig` and MaxText's `skip_step_on_spikes`: with the mean m and the standard deviation
    s of the last 128 values, a value above m + 6 s is an outlier. `loss_spike` finds more.

    Differs from all three (docs/recipes.md): an outlier enters the window as its limit m + 6 s,
    which still follows a true level shift; NaN and Inf do not enter; s is at least `min_rel_std` of
    m.
    """

    sigmas: Any = 6.0
    """Standard deviations above the mean at which a value is an outlier."""
    window: int = 128
    """How many values count. Static: it is the length of an array in the state."""
    warmup_steps: Any = 64
    """Values held before one is judged; at most `window`."""
    bessel: bool = True
    """Variance over n - 1 (OLMo, MaxText), else over n (Levanter). Static."""
    min_rel_std: Any = 1e-4
    """Floor of the standard deviation as a fraction of the mean."""
    sustain: Any = 5
    """Outliers in a row that make it sustained."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})

    def init(self) -> WindowState:
        """No value seen."""
        return WindowState(empty(self.window), np.zeros((), np.int32))

    def update(self, state: WindowState, seen: Observed, *, xp: Any) -> tuple[WindowState, Reading]:
        """Judges the signal in `NEEDS` against the window, then learns it."""
        (signal,) = self.NEEDS
        value, learn = getattr(seen, signal), seen.finite
        held = cleared(state.window, seen.restart, xp=xp)
        usual = mean(held, xp=xp)
        raw = variance(held, usual, self.bessel, xp=xp)
        # Floors as in ZClip: XLA would make (m m) c^2 of (c m)(c m), and |x| of sqrt(x x). Squares
        # of 1e-20 are subnormal, which XLA flushes: they are made zero everywhere.
        floor = numerics.product(self.min_rel_std, xp.abs(usual), xp=xp)
        square = numerics.settle(numerics.product(floor, floor, xp=xp), xp=xp)
        var = numerics.larger(raw, square, xp=xp)
        sigma = numerics.larger(xp.sqrt(raw), floor, xp=xp)

        known = (held.count > 0) & (held.count >= self.warmup_steps) & (var > 0)
        k = self.sigmas
        gap = value - usual
        square = numerics.settle(numerics.product(gap, gap, xp=xp), xp=xp)
        far = (gap > 0) & (square > k * numerics.product(k, var, xp=xp))
        alarm = learn & known & far

        limit = usual + xp.where(alarm, numerics.product(k, sigma, xp=xp), 0.0)
        entered = numerics.settle(xp.where(alarm, limit, value), xp=xp)
        held = push(held, self.window, entered, learn, xp=xp)
        run = xp.where(seen.restart, 0, state.run)
        more = xp.where(run < self.sustain, run + 1, run)
        run = xp.where(learn, xp.where(alarm, more, 0), run)
        return WindowState(held, run), Reading(alarm, alarm & (run >= self.sustain))


class GradWindowConfig(LossWindowConfig):
    """A gradient norm, before clipping, many standard deviations above the last norms' mean.

    MaxText's rule judges the clipped norm, which a limit of 1.0 makes useless.
    """

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})
