"""Detectors that compare a value with a window of recent values.

The values are in a ring of fixed size. A running sum would keep every rounding error, and one value
of 1e15 would erase all others permanently. `xp.sum` adds in a different order in each backend. So
the length of the ring is a power of two, and the sum folds it in half: the same additions in every
backend, with the error of a pairwise sum.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.ranges import NotNegative, OnOff, Positive, Steps, number, whole
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading


class Window(NamedTuple):
    """A ring of recent values."""

    values: Any  # float32 (a power of two,): the recent values; 0 in an empty slot
    place: Any  # int32: index of the next slot
    count: Any  # int32: number of values, at most the window's length


def empty(length: int) -> Window:
    """An empty window of `length` values."""
    slots = 1 << (length - 1).bit_length()
    zero = np.zeros((), np.int32)
    return Window(np.zeros((slots,), np.float32), zero, zero.copy())


def cleared(window: Window, when: Any, *, xp: Any) -> Window:
    """Returns the window, emptied where `when` holds."""
    return Window(
        xp.where(when[..., None], 0.0, window.values),
        xp.where(when, 0, window.place),
        xp.where(when, 0, window.count),
    )


def push(window: Window, length: int, value: Any, learn: Any, *, xp: Any) -> Window:
    """Replaces the oldest value by `value` where `learn` holds; `length` is as in `empty`."""
    slots = window.values.shape[-1]
    slot = (xp.arange(slots) == window.place[..., None]) & learn[..., None]
    after = window.place + 1
    return Window(
        xp.where(slot, value[..., None], window.values),
        xp.where(learn, xp.where(after < length, after, 0), window.place),
        xp.where(learn & (window.count < length), window.count + 1, window.count),
    )


def mean(window: Window, *, xp: Any) -> Any:
    """Mean of the values; 0 for an empty window."""
    divisor = numerics.as_float(xp.where(window.count > 0, window.count, 1), xp=xp)
    return numerics.quotient(total(window.values), divisor, xp=xp)


def variance(window: Window, mean: Any, bessel: bool, *, xp: Any) -> Any:
    """Mean square of the deviations from `mean`; a running sum of squares would round it away."""
    slots = window.values.shape[-1]
    occupied = xp.arange(slots) < window.count[..., None]
    deviation = xp.where(occupied, window.values - mean[..., None], 0.0)
    squares = numerics.settle(numerics.product(deviation, deviation, xp=xp), xp=xp)
    several = window.count > (1 if bessel else 0)
    divisor = xp.where(several, window.count - 1 if bessel else window.count, 1)
    return numerics.quotient(total(squares), numerics.as_float(divisor, xp=xp), xp=xp)


def total(values: Any) -> Any:
    """Sums along the last axis, a power of two, in the same order in all backends."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def largest(values: Any, *, xp: Any) -> Any:
    """Maximum along the last axis, a power of two."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = xp.maximum(values[..., :half], values[..., half:])
    return values[..., 0]


class LossRatioState(NamedTuple):
    """The window, and the count of consecutive outliers."""

    window: Window
    last: Any  # float32: last accepted loss
    run: Any  # int32: consecutive outliers, at most `escape`


class LossRatioConfig(NamedTuple):
    """A loss that is several times the mean of recent losses.

    The rule of Lightning's `SpikeDetection` (three times the mean of 10), llm-foundry's
    `KillLossSpike` (twice the mean of the window, five in a row) and the self-healing callback for
    TRL (five times the mean of 100). It exists for the recipes; `loss_spike` uses the run's noise
    and detects far more.

    Differences (docs/recipes.md): only finite, accepted losses enter the window. After `escape`
    consecutive outliers the window restarts at the current loss. If the window contains a negative
    loss, or half of it is 0, an outlier must be `ratio` times the largest absolute value in a full
    window away from the mean. So the noise of a loss around zero (GRPO) is no spike, and a window
    of zeros judges nothing.
    """

    ratio: Annotated[Any, number(above=1)] = 2.0
    """Multiple of the mean from which a loss is an outlier; above 1."""
    window: Annotated[int, whole(1, 4096)] = 100
    """Number of accepted losses in the window. Static: it is the length of an array."""
    warmup_steps: Steps = 25
    """Number of losses learnt before any is judged; at most `window`."""
    sustain: Steps = 5
    """Consecutive outliers that make the alarm sustained."""
    escape: Steps = 25
    """Consecutive outliers after which the window restarts at the current loss."""

    AT_MOST = (("warmup_steps", "window"), ("sustain", "escape"))
    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})

    def init(self) -> LossRatioState:
        """The state before the first step."""
        return LossRatioState(empty(self.window), np.zeros((), np.float32), np.zeros((), np.int32))

    def update(
        self, state: LossRatioState, seen: Observed, *, xp: Any
    ) -> tuple[LossRatioState, Reading]:
        """Judges `seen.loss` against the window, then learns it if accepted."""
        learn, loss = seen.finite, seen.loss
        window = cleared(state.window, seen.restart, xp=xp)
        usual = mean(window, xp=xp)
        negative = xp.sum(xp.astype(window.values < 0, xp.int32), axis=-1)
        positive = xp.sum(xp.astype(window.values > 0, xp.int32), axis=-1)
        plain = (negative == 0) & (2 * positive > window.count)
        level = xp.where(plain, usual, largest(xp.abs(window.values), xp=xp))

        known = (window.count > 0) & (window.count >= self.warmup_steps) & (level > 0)
        known = known & (plain | (window.count >= self.window))
        needed = numerics.product(self.ratio, level, xp=xp)
        outlier = xp.where(plain, loss, loss - usual) >= needed
        alarm = learn & known & outlier & (loss > state.last)

        streak = xp.where(seen.restart, 0, state.run)
        streak = xp.where(learn, xp.where(alarm, streak + 1, 0), streak)
        sustained = alarm & (streak >= self.sustain)
        escaped = alarm & (streak >= self.escape)
        accepted = learn & (~alarm | escaped)
        window = cleared(window, escaped, xp=xp)
        window = push(window, self.window, loss, accepted, xp=xp)
        last = xp.where(accepted, loss, state.last)
        new = LossRatioState(window, last, xp.where(escaped, 0, streak))
        return new, Reading(alarm, sustained)


class WindowState(NamedTuple):
    """The window, and the count of consecutive outliers."""

    window: Window
    run: Any  # int32: consecutive outliers, at most `sustain`


class LossWindowConfig(NamedTuple):
    """A loss many standard deviations above the mean of recent losses.

    The rule of OLMo's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py), Levanter's
    `SkipStepConfig` and MaxText's `skip_step_on_spikes`: with mean m and standard deviation s of
    the last 128 values, a value above m + 6 s is an outlier. `loss_spike` detects more.

    Differences from all three (docs/recipes.md): an outlier enters the window as its limit m + 6 s,
    which still follows a lasting level shift. NaN and Inf do not enter. s is at least `min_rel_std`
    of m.
    """

    sigmas: Positive = 6.0
    """Standard deviations above the mean from which a value is an outlier."""
    window: Annotated[int, whole(2, 4096)] = 128
    """Number of values in the window. Static: it is the length of an array."""
    warmup_steps: Annotated[Any, whole(2, 4096)] = 64
    """Number of values in the window before any is judged; at most `window`."""
    bessel: OnOff = True
    """Whether the variance divides by n - 1 (OLMo, MaxText), not by n (Levanter). Static."""
    min_rel_std: NotNegative = 1e-4
    """Floor of the standard deviation as a fraction of the mean."""
    sustain: Steps = 5
    """Consecutive outliers that make the alarm sustained."""

    AT_MOST = (("warmup_steps", "window"),)
    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})

    def init(self) -> WindowState:
        """The state before the first value."""
        return WindowState(empty(self.window), np.zeros((), np.int32))

    def update(self, state: WindowState, seen: Observed, *, xp: Any) -> tuple[WindowState, Reading]:
        """Judges the signal in `NEEDS` against the window, then learns it."""
        (signal,) = self.NEEDS
        value, learn = getattr(seen, signal), seen.finite
        window = cleared(state.window, seen.restart, xp=xp)
        usual = mean(window, xp=xp)
        raw_var = variance(window, usual, self.bessel, xp=xp)
        # Floors as in ZClip: XLA rewrites (c m)(c m) as (m m) c^2, and sqrt(x x) as |x|. Squares of
        # 1e-20 are subnormal, and XLA flushes them, so `settle` sets them to zero everywhere.
        floor = numerics.product(self.min_rel_std, xp.abs(usual), xp=xp)
        square = numerics.settle(numerics.product(floor, floor, xp=xp), xp=xp)
        var = xp.maximum(raw_var, square)
        sigma = xp.maximum(xp.sqrt(raw_var), floor)

        known = (window.count > 0) & (window.count >= self.warmup_steps) & (var > 0)
        k = self.sigmas
        gap = value - usual
        square = numerics.settle(numerics.product(gap, gap, xp=xp), xp=xp)
        outlier = (gap > 0) & (square > k * numerics.product(k, var, xp=xp))
        alarm = learn & known & outlier

        limit = usual + xp.where(alarm, numerics.product(k, sigma, xp=xp), 0.0)
        limited = numerics.settle(xp.where(alarm, limit, value), xp=xp)
        window = push(window, self.window, limited, learn, xp=xp)
        streak = xp.where(seen.restart, 0, state.run)
        longer = xp.where(streak < self.sustain, streak + 1, streak)
        streak = xp.where(learn, xp.where(alarm, longer, 0), streak)
        return WindowState(window, streak), Reading(alarm, alarm & (streak >= self.sustain))


class GradWindowConfig(LossWindowConfig):
    """A gradient norm, before clipping, many standard deviations above the mean of recent norms.

    MaxText's rule judges the clipped norm; with a limit of 1.0 no norm is then an outlier.
    """

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})
