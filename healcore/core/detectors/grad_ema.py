"""Gradient EMA: the norm is far above the bias-corrected moving average of accepted norms."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import numpy as np

from healcore.core import baseline, numerics, ranges
from healcore.core.signals import Observed
from healcore.core.verdict import Cause, Reading


class GradEmaState(NamedTuple):
    """Moments of the accepted norms."""

    count: Any  # int32: norms learnt, at most `warmup_steps`
    weight: Any  # float32: 1 - decay ** (norms learnt), the sum of the weights
    mean: Any  # float32
    var: Any  # float32
    shift: baseline.ShiftState


class GradEmaConfig(NamedTuple):
    """AXLearn's `skip_and_clip_by_global_norm` (axlearn/common/optimizers.py) with adaptive limits.

    A norm g is an outlier if g >= 20 mu (`drop_norm_by_grad_norm_ema`, here `ratio`), or, after 500
    steps, if g >= mu + 20 sigma (`drop_norm_by_grad_norm_stddev`, here `sigmas`). The moments of
    the accepted norms are weighted as in section 7.1 of Adafactor (arXiv:1804.04235).

    Differences (docs/recipes.md): the first norm is learnt, not compared with 1. The average
    follows lasting level shifts. The variance is the mean square of the deviations, because E[g^2]
    - E[g]^2 can round to 0 or below. sigma is at least `min_rel_std` of mu. Zero norms are not
    learnt, and the warm-up is robust (`baseline`).
    """

    ratio: Annotated[Any | None, ranges.number(above=1, none=True)] = 20.0
    """Smallest ratio of an outlier to the average, or None for no such test."""
    sigmas: ranges.Limit = None
    """Height of an outlier above the average in standard deviations, or None for no such test."""
    ema_decay: ranges.Fraction = 0.99
    """Decay of average and variance per accepted step."""
    warmup_steps: ranges.Steps = 1
    """Number of norms learnt before any is judged."""
    min_rel_std: ranges.NotNegative = 0.01
    """Floor of the standard deviation as a fraction of the average."""
    sustain: Annotated[Any, ranges.whole(1, 1_000_000)] = 5
    """Consecutive rejections (leaky count) that make the alarm sustained."""
    shift: baseline.ShiftConfig = baseline.ShiftConfig()
    """When repeatedly rejected norms become the new level."""

    AT_MOST = (("sustain", "shift.patience"),)
    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})

    def init(self) -> GradEmaState:
        """The state before the first norm."""
        floats = (np.zeros((), np.float32) for _ in ("weight", "mean", "var"))
        return GradEmaState(np.zeros((), np.int32), *floats, shift=baseline.no_rejections())

    def update(
        self, state: GradEmaState, seen: Observed, *, xp: Any
    ) -> tuple[GradEmaState, Reading]:
        """Judges `seen.grad_norm`, then learns it if accepted."""
        norm = seen.grad_norm
        learn = seen.finite & (norm > 0)
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        alarm = learn & ~warm & _is_outlier(self, state, norm, xp=xp)
        shift_state, shift = baseline.watch_level(
            self.shift, state.shift, norm, alarm, learn & ~warm, seen.restart, xp=xp
        )
        accepted = learn & ~alarm
        value, first_were_outliers = baseline.limit_outlier(norm, state.mean, count, warm, xp=xp)
        count = xp.where(accepted & first_were_outliers, 0, count)
        first = count == 0
        old_weight = xp.where(first, 0.0, state.weight)
        complement = numerics.complement(self.ema_decay, norm)
        weight = numerics.ema(old_weight, norm - norm + 1.0, complement, accepted, xp=xp)
        # Weight of the new value: 1 for the first value, 1 - decay in the long run.
        rate = numerics.quotient(complement, xp.where(weight > 0, weight, 1.0), xp=xp)
        start = xp.where(first, 0.0, state.mean)
        mean = numerics.ema(start, value, rate, accepted, xp=xp)
        square = numerics.settle(numerics.product(value - start, value - mean, xp=xp), xp=xp)
        var = numerics.ema(xp.where(first, 0.0, state.var), square, rate, accepted, xp=xp)
        var = xp.where(var > 0, var, 0.0)

        sustained = alarm & (shift_state.run >= self.sustain * self.shift.gain)
        learnt = GradEmaState(
            count=xp.where(accepted & warm, count + 1, count),
            weight=xp.where(accepted, weight, state.weight),
            mean=xp.where(shift.escaped, shift.level, xp.where(accepted, mean, state.mean)),
            var=xp.where(shift.escaped, shift.spread, xp.where(accepted, var, state.var)),
            shift=shift_state,
        )
        return learnt, Reading(alarm, sustained | shift.escaped)


def _is_outlier(config: GradEmaConfig, state: GradEmaState, norm: Any, *, xp: Any) -> Any:
    """Whether the norm fails one of the two tests."""
    outlier = norm < 0
    if config.ratio is not None:
        outlier = outlier | (norm >= config.ratio * state.mean)
    if config.sigmas is not None:
        k, gap = config.sigmas, norm - state.mean
        floor = numerics.product(config.min_rel_std, state.mean, xp=xp)
        min_var = numerics.settle(numerics.product(floor, floor, xp=xp), xp=xp)
        limit = k * numerics.product(k, xp.maximum(state.var, min_var), xp=xp)
        square = numerics.settle(numerics.product(gap, gap, xp=xp), xp=xp)
        outlier = outlier | ((gap > 0) & (square >= limit))
    return outlier
