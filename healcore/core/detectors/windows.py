"""Published rules that compare a value with recent values: a window, or a moving average.

A window is a ring of fixed size. A running sum would keep every rounding error, and one value of
1e15 would erase all others permanently. `xp.sum` adds in a different order in each backend. So the
length of the ring is a power of two, and the sum folds it in half: the same additions in every
backend, with the error of a pairwise sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, NamedTuple

import numpy as np

from healcore.core import baseline
from healcore.core.array_namespace import Flag, Float, Int, Number, complement, one_like, xp
from healcore.core.decision import Cause, DetectorResult
from healcore.core.ranges import Fraction, NotNegative, Positive, Range, Steps, whole
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init, zeros


class Window(NamedTuple):
    """A ring of recent values, of a fixed size, because a compiled step has fixed shapes.

    `push` replaces the oldest value. `mean` and `variance` read all values, in an order that gives
    the same bits in every array library.
    """

    values: Float
    """(a power of two,): the recent values; 0 in an empty slot."""
    place: Int
    """Index of the next slot."""
    count: Int
    """Number of values, at most the window's length."""


def empty(length: int) -> Window:
    """Makes an empty window.

    Args:
        length: number of values, which is rounded up to a power of two for the ring's slots.

    Returns:
        The window in NumPy, with 0 in all slots.
    """
    slots = 1 << (length - 1).bit_length()
    return zeros(Window)._replace(values=np.zeros((slots,), np.float32))


def cleared(window: Window, when: Flag) -> Window:
    """Empties a window where a flag is set, at an expected change or after an escape.

    Args:
        window: the window.
        when: bool 0-d, or with the leading axes of the window.
    """
    return Window(
        xp.where(when[..., None], 0.0, window.values),
        xp.where(when, 0, window.place),
        xp.where(when, 0, window.count),
    )


def push(window: Window, length: int, value: Float, learn: Flag) -> Window:
    """Replaces the oldest value of a window.

    Args:
        window: the window.
        length: number of values, as in `empty`.
        value: the new value, float32 0-d.
        learn: whether the value enters the window, bool 0-d.

    Returns:
        The window with the new value, or the same window where `learn` does not hold.
    """
    values = xp.with_slot(window.values, window.place, value)
    after = window.place + 1
    return Window(
        xp.where(learn[..., None], values, window.values),
        xp.where(learn, xp.where(after < length, after, 0), window.place),
        xp.where(learn & (window.count < length), window.count + 1, window.count),
    )


def mean(window: Window) -> Float:
    """Returns the mean of the values of a window; 0 if it is empty.

    Args:
        window: the window.
    """
    divisor = xp.as_float(xp.where(window.count > 0, window.count, 1))
    return xp.quotient(folded(window.values, operator.add), divisor)


def variance(window: Window, mean: Float, bessel: bool) -> Float:
    """Returns the mean square of the deviations from the mean.

    A running sum of squares would round a small variance away.

    Args:
        window: the window.
        mean: result of `mean`, float32 0-d.
        bessel: whether to divide by n - 1 instead of n.
    """
    occupied = xp.places(window.values) < window.count[..., None]
    deviation = xp.where(occupied, window.values - mean[..., None], 0.0)
    squares = xp.flush(xp.product(deviation, deviation))
    if bessel:
        divisor = window.count - 1
    else:
        divisor = window.count
    divisor = xp.where(divisor > 0, divisor, 1)
    total = folded(squares, operator.add)
    return xp.quotient(total, xp.as_float(divisor))


def folded(values: Float, combine: Callable[[Float, Float], Float]) -> Float:
    """Combines the values along the last axis, in one order in all backends.

    `xp.sum` adds in another order in each backend, and the last bits would differ.

    Args:
        values: float32 (..., n), where n is a power of two.
        combine: a function of two arrays, such as `operator.add`.

    Returns:
        float32 (...,).
    """
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = combine(values[..., :half], values[..., half:])
    return values[..., 0]


class LossRatioState(NamedTuple):
    """The window, the last accepted loss, and the count of consecutive outliers.

    An outlier that is at most the last accepted loss raises no alarm: the loss does not rise.
    """

    window: Window
    """The accepted losses."""
    last: Float
    """Last accepted loss."""
    streak: Int
    """Consecutive outliers."""


class LossRatioConfig(NamedTuple):
    """A loss that is several times the mean of recent losses.

    The rule of Lightning's `SpikeDetection` (three times the mean of 10), llm-foundry's
    `KillLossSpike` (twice the mean of the window, five in a row) and the self-healing callback for
    TRL (five times the mean of 100). It exists for the recipes; `loss_spike` uses the run's noise
    and detects far more.

    Differences (docs/recipes.md): only finite, accepted losses enter the window. After `escape`
    consecutive outliers the window restarts at the current loss. If the window contains a negative
    loss, or half of it is 0, an outlier must be `ratio` times the largest absolute value in a full
    window away from the mean. So the noise of a loss around zero (GRPO) is not a spike, and a
    window of zeros judges nothing.
    """

    ratio: Annotated[Number, Range(gt=1)] = 2.0
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
    NEEDS = ("loss",)

    def init(self) -> LossRatioState:
        """Makes the state before the first step."""
        return zeros(LossRatioState)._replace(window=empty(self.window))

    def update(
        self, state: LossRatioState, seen: CheckedSignals
    ) -> tuple[LossRatioState, DetectorResult]:
        """Judges `seen.loss` against the window, then learns it if accepted.

        Args:
            state: the state before the step.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at each outlier, which is sustained
            after `sustain` of them in a row.
        """
        learn, loss = seen.finite, seen.loss
        window = cleared(state.window, seen.restart)
        usual = mean(window)
        negative = xp.sum(xp.as_int(window.values < 0), -1)
        positive = xp.sum(xp.as_int(window.values > 0), -1)
        plain = (negative == 0) & (2 * positive > window.count)
        level = xp.where(plain, usual, folded(abs(window.values), xp.maximum))

        known = (window.count > 0) & (window.count >= self.warmup_steps) & (level > 0)
        known = known & (plain | (window.count >= self.window))
        needed = xp.product(self.ratio, level)
        outlier = xp.where(plain, loss, loss - usual) >= needed
        alarm = learn & known & outlier & (loss > state.last)

        streak = xp.streak(state.streak, alarm, learn, seen.restart)
        sustained = alarm & (streak >= self.sustain)
        escaped = alarm & (streak >= self.escape)
        accepted = learn & (~alarm | escaped)
        window = cleared(window, escaped)
        window = push(window, self.window, loss, accepted)
        last = xp.where(accepted, loss, state.last)
        new = LossRatioState(window, last, xp.where(escaped, 0, streak))
        return new, DetectorResult(alarm, sustained)


class WindowState(NamedTuple):
    """The window, and the count of consecutive outliers.

    The state of both detectors with a window, of losses and of norms. An outlier enters the window
    as its limit, so that one outlier does not hide the next.
    """

    window: Window
    """The recent values, outliers as their limit."""
    streak: Int
    """Consecutive outliers."""


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
    warmup_steps: Annotated[Number, whole(2, 4096)] = 64
    """Number of values in the window before any is judged; at most `window`."""
    bessel: bool = True
    """Whether the variance divides by n - 1 (OLMo, MaxText), not by n (Levanter). Static."""
    min_rel_std: NotNegative = 1e-4
    """Floor of the standard deviation as a fraction of the mean."""
    sustain: Steps = 5
    """Consecutive outliers that make the alarm sustained."""

    AT_MOST = (("warmup_steps", "window"),)
    CAUSE = Cause.LOSS_SPIKE
    NEEDS = ("loss",)

    def init(self) -> WindowState:
        """Makes the state before the first value."""
        return zeros(WindowState)._replace(window=empty(self.window))

    def update(
        self, state: WindowState, seen: CheckedSignals
    ) -> tuple[WindowState, DetectorResult]:
        """Judges the signal in `NEEDS` against the window, then learns it.

        Args:
            state: the state before the step.
            seen: the signals of the step. Reads the signal in `NEEDS`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at each outlier, which is sustained
            after `sustain` of them in a row.
        """
        (signal,) = self.NEEDS
        value, learn = getattr(seen, signal), seen.finite
        window = cleared(state.window, seen.restart)
        usual = mean(window)
        raw_var = variance(window, usual, self.bessel)
        # Floors as in ZClip: XLA rewrites (c m)(c m) as (m m) c^2, and sqrt(x x) as |x|. Squares of
        # 1e-20 are subnormal, and XLA flushes them, so `flush` sets them to zero everywhere.
        floor = xp.product(self.min_rel_std, abs(usual))
        square = xp.flush(xp.product(floor, floor))
        var = xp.maximum(raw_var, square)
        sigma = xp.maximum(xp.sqrt(raw_var), floor)

        known = (window.count > 0) & (window.count >= self.warmup_steps) & (var > 0)
        k = self.sigmas
        gap = value - usual
        square = xp.flush(xp.product(gap, gap))
        outlier = (gap > 0) & (square > k * xp.product(k, var))
        alarm = learn & known & outlier

        limit = usual + xp.where(alarm, xp.product(k, sigma), 0.0)
        limited = xp.flush(xp.where(alarm, limit, value))
        window = push(window, self.window, limited, learn)
        streak = xp.streak(state.streak, alarm, learn, seen.restart)
        return WindowState(window, streak), DetectorResult(alarm, alarm & (streak >= self.sustain))


class GradWindowConfig(LossWindowConfig):
    """A gradient norm, before clipping, many standard deviations above the mean of recent norms.

    MaxText's rule judges the clipped norm; with a limit of 1.0 no norm is then an outlier. The
    fields and their defaults are the same as for losses.
    """

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = ("grad_norm",)


class GradEmaState(NamedTuple):
    """Average of the accepted norms, float32 0-d.

    A weighted average, corrected for the short history at the start of a run: dividing by `weight`
    removes the zeros with which it begins, as Adam's bias correction does.
    """

    count: Int
    """Norms learnt, at most `warmup_steps`."""
    weight: Float
    """1 - decay ** (norms learnt), the sum of the weights."""
    mean: Float
    """Average of the accepted norms."""
    shift: baseline.ShiftState
    """The count of rejections, by which the average follows a lasting level shift."""


class GradEmaConfig(NamedTuple):
    """A norm that is many times the average of the accepted norms.

    The rule of AXLearn's `skip_and_clip_by_global_norm` (axlearn/common/optimizers.py) with
    `drop_norm_by_grad_norm_ema`: a norm g is an outlier if g >= 20 mu. The accepted norms are
    weighted as in section 7.1 of Adafactor (arXiv:1804.04235).

    Differences (docs/recipes.md): the first norm is learnt, not compared with 1. The average
    follows lasting level shifts. Zero norms are not learnt.
    """

    ratio: Annotated[Number, Range(gt=1)] = 20.0
    """Smallest ratio of an outlier to the average."""
    ema_decay: Fraction = 0.99
    """Decay of the average per accepted step."""
    warmup_steps: Steps = 1
    """Number of norms learnt before any is judged."""
    sustain: Annotated[Number, whole(1, 1_000_000)] = 5
    """Consecutive rejections (leaky count) that make the alarm sustained."""
    shift: baseline.ShiftConfig = baseline.ShiftConfig()
    """When repeatedly rejected norms become the new level."""

    AT_MOST = (("sustain", "shift.patience"),)
    CAUSE = Cause.GRAD_SPIKE
    NEEDS = ("grad_norm",)
    init = zero_init(GradEmaState)

    def update(
        self, state: GradEmaState, seen: CheckedSignals
    ) -> tuple[GradEmaState, DetectorResult]:
        """Judges `seen.grad_norm`, then learns it if accepted. Skips norms of 0.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at each outlier, which is sustained
            after `sustain` rejections, and where the average accepts the new level.
        """
        norm = seen.grad_norm
        learn = seen.finite & (norm > 0)
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        alarm = learn & ~warm & (norm >= self.ratio * state.mean)
        shift, escaped = baseline.watch_level(
            self.shift, state.shift, norm, alarm, learn & ~warm, seen.restart
        )
        accepted = learn & ~alarm
        first = count == 0
        old_weight = xp.where(first, 0.0, state.weight)
        share = complement(self.ema_decay, norm)
        weight = xp.ema(old_weight, one_like(norm), share, accepted)
        # Weight of the new value: 1 for the first value, 1 - decay in the long run.
        rate = xp.quotient(share, xp.where(weight > 0, weight, 1.0))
        mean = xp.ema(xp.where(first, 0.0, state.mean), norm, rate, accepted)
        sustained = alarm & (shift.rejections >= self.sustain * self.shift.gain)
        learnt = GradEmaState(
            count=xp.where(accepted & warm, count + 1, count),
            weight=xp.where(accepted, weight, state.weight),
            mean=xp.where(escaped, shift.level, xp.where(accepted, mean, state.mean)),
            shift=shift,
        )
        return learnt, DetectorResult(alarm, sustained | escaped)
