"""A value many standard deviations above the mean of the last ones, for losses and norms.

The rule of OLMo's `SkipStepOptimizer` (olmo_core/optim/skip_step_optimizer.py), Levanter's
`SkipStepConfig` and MaxText's `skip_step_on_spikes`: with the mean m and the standard deviation s
of the last 128 values, a value above m + 6 s is an outlier.

Differs from all three (docs/recipes.md): an outlier enters the window as its limit m + 6 s, which
still follows a true level shift; NaN and Inf do not enter; s is at least `min_rel_std` of m.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics, window


class WindowOutlierConfig(NamedTuple):
    """Thresholds; numbers may be arrays, but for `window`."""

    sigmas: Any = 6.0
    """Standard deviations above the mean that are out of line."""
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


class WindowOutlierState(NamedTuple):
    """The window, and the outliers in a row."""

    window: window.Window
    run: Any  # int32: outliers in a row, up to `sustain`


class WindowOutlier(NamedTuple):
    """The result for one step."""

    alarm: Any
    sustained: Any
    z: Any


def init(config: WindowOutlierConfig) -> WindowOutlierState:
    """No value seen."""
    return WindowOutlierState(window.init(config.window), np.zeros((), np.int32))


def update(
    config: WindowOutlierConfig,
    state: WindowOutlierState,
    value: Any,
    learn: Any,
    restart: Any,
    *,
    xp: Any,
) -> tuple[WindowOutlierState, WindowOutlier]:
    """Judges `value` (float32, finite) against the window, then learns it where `learn` holds."""
    held = window.cleared(state.window, restart, xp=xp)
    mean = window.mean(held, xp=xp)
    raw = _variance(held, mean, config.bessel, xp=xp)
    # Floors as in ZClip: XLA would make (m m) c^2 of (c m)(c m), and |x| of sqrt(x x). Squares of
    # 1e-20 are subnormal, which XLA flushes: they are made zero everywhere.
    floor = numerics.product(config.min_rel_std, xp.abs(mean), xp=xp)
    square = numerics.settle(numerics.product(floor, floor, xp=xp), xp=xp)
    var = numerics.larger(raw, square, xp=xp)
    sigma = numerics.larger(xp.sqrt(raw), floor, xp=xp)

    known = (held.count > 0) & (held.count >= config.warmup_steps) & (var > 0)
    k = config.sigmas
    gap = value - mean
    square = numerics.settle(numerics.product(gap, gap, xp=xp), xp=xp)
    far = (gap > 0) & (square > k * numerics.product(k, var, xp=xp))
    alarm = learn & known & far
    z = numerics.quotient(gap, xp.where(known, sigma, 1.0), xp=xp)

    limit = mean + xp.where(alarm, numerics.product(k, sigma, xp=xp), 0.0)
    entered = numerics.settle(xp.where(alarm, limit, value), xp=xp)
    held = window.push(held, config.window, entered, learn, xp=xp)
    run = xp.where(restart, 0, state.run)
    more = xp.where(run < config.sustain, run + 1, run)
    run = xp.where(learn, xp.where(alarm, more, 0), run)
    sustained = alarm & (run >= config.sustain)
    return WindowOutlierState(held, run), WindowOutlier(
        alarm, sustained, xp.where(known & learn, z, 0.0)
    )


def _variance(held: window.Window, mean: Any, bessel: bool, *, xp: Any) -> Any:
    """Mean square of the deviations from `mean`; a running sum of squares loses it in rounding."""
    slots = held.values.shape[-1]
    there = xp.arange(slots) < held.count[..., None]
    off = xp.where(there, held.values - mean[..., None], 0.0)
    squares = numerics.settle(numerics.product(off, off, xp=xp), xp=xp)
    several = held.count > (1 if bessel else 0)
    divisor = xp.where(several, held.count - 1 if bessel else held.count, 1)
    total = window.total(squares)
    return numerics.quotient(total, numerics.as_float(divisor, xp=xp), xp=xp)
