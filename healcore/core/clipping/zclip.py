"""ZClip: clips a gradient norm that is unusually large for its history.

Kumar et al., 2025, arXiv:2504.02507 (package `zclip` 1.0.0). The first `warmup_steps` raw norms
give the mean mu and the population variance v. With z = (g - mu) / sqrt(v), a norm with z above the
threshold k is reduced to T: `mu + k^2 sigma / z` (reciprocal), `mu` (mean) or `mu + k sigma` (max).
Then mu' = a mu + (1 - a) u and v' = a v + (1 - a) (u - mu')^2, where u is T for a clipped norm,
else g.

Differences from the paper (reasons and numbers: docs/detectors.md, docs/recipes.md):

* The baseline follows lasting level shifts, and the warm-up is robust (`baseline`).
* NaN, Inf and zero norms are not learnt, and sigma is at least `min_rel_std` of mu. In the
  published rule one NaN disables clipping permanently, and a run of zeros clips to zero.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from healcore.core import baseline, numerics
from healcore.core.clipping.fixed import Clip, scale_to
from healcore.core.ranges import Fraction, Limit, NotNegative, Positive, Steps, one_of
from healcore.core.signals import Observed
from healcore.core.tree import Float, Int, zero_init


class ZClipState(NamedTuple):
    """Statistics of the accepted norms."""

    count: Int  # norms learnt, at most `warmup_steps`
    mean: Float
    var: Float  # population variance during warm-up, then its moving average
    shift: baseline.ShiftState


class ZClipConfig(NamedTuple):
    """Parameters of ZClip."""

    z_threshold: Positive = 2.5
    """z-score above which a norm is a spike (paper: 2.5; 2.0 at learning rates >= 3e-3)."""
    ema_decay: Fraction = 0.97
    """Decay of mean and variance per step, in (0, 1)."""
    warmup_steps: Steps = 25
    """Number of positive finite norms averaged before the z-score is used."""
    target: Annotated[str, one_of("reciprocal", "mean", "max")] = "reciprocal"
    """Norm to which a spike is reduced: reciprocal, mean or max. Static."""
    max_norm: Limit = 1.0
    """Additional absolute limit, also during the warm-up, or None."""
    min_rel_std: NotNegative = 0.01
    """Floor of sigma as a fraction of the mean."""
    shift: baseline.ShiftConfig = baseline.ShiftConfig()
    """When repeatedly clipped norms become the new level."""

    kind = "zclip"
    init = zero_init(ZClipState)

    def update(
        self, state: ZClipState, seen: Observed, learn: Any, *, xp: Any
    ) -> tuple[ZClipState, Clip]:
        """Judges `seen.grad_norm`, then learns it."""
        norm = seen.grad_norm
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        # Separate products, and the floor again after the root, because XLA rewrites (c m)(c m) as
        # (m m) c^2, and sqrt(x x) as |x|.
        floor = numerics.product(self.min_rel_std, state.mean, xp=xp)
        var = xp.maximum(state.var, numerics.product(floor, floor, xp=xp))
        sigma = xp.maximum(xp.sqrt(state.var), floor)

        # z > k without a root: gap^2 > k^2 v. With two products a Python number and an array (a
        # vmapped sweep) round alike, and XLA does not compute (k k) v.
        k = self.z_threshold
        gap = norm - state.mean
        limit = k * numerics.product(k, var, xp=xp)
        spike = ~warm & (gap > 0) & (gap * gap > limit)
        safe_gap = xp.where(spike, gap, 1.0)
        if self.target == "reciprocal":
            target = state.mean + xp.where(spike, numerics.quotient(limit, safe_gap, xp=xp), 0.0)
        elif self.target == "mean":
            target = state.mean
        else:
            target = state.mean + xp.where(spike, numerics.product(k, sigma, xp=xp), 0.0)

        accepted = xp.where(spike, target, norm)
        effective = accepted
        threshold = xp.where(warm, 0.0, state.mean + numerics.product(k, sigma, xp=xp))
        if self.max_norm is not None:
            effective = xp.minimum(effective, self.max_norm)
            lower = (threshold == 0) | (threshold > self.max_norm)
            threshold = xp.where(lower, self.max_norm, threshold)
        over = norm > effective
        scale = scale_to(effective, norm, over, xp=xp)
        known = ~warm & (sigma > 0)
        z = xp.where(known, numerics.quotient(gap, xp.where(known, sigma, 1.0), xp=xp), 0.0)

        learn = learn & seen.finite & (norm > 0)
        learnt = _learn(self, state, count, norm, accepted, learn, xp=xp)
        shift_state, shift = baseline.watch_level(
            self.shift, state.shift, norm, spike, learn & ~warm, seen.restart, xp=xp
        )
        return ZClipState(
            count=learnt.count,
            mean=xp.where(shift.escaped, shift.level, learnt.mean),
            var=xp.where(shift.escaped, shift.spread, learnt.var),
            shift=shift_state,
        ), Clip(scale, threshold, z, over)


def _learn(
    config: ZClipConfig,
    state: ZClipState,
    count: Any,
    norm: Any,
    accepted: Any,
    learn: Any,
    *,
    xp: Any,
) -> ZClipState:
    """Updates mean and variance: Welford during warm-up, then moving averages."""
    warm = count < config.warmup_steps
    value, first_were_outliers = baseline.limit_outlier(accepted, state.mean, count, warm, xp=xp)
    count = xp.where(learn & first_were_outliers, 0, count)
    known = count > 0
    mean = xp.where(known, state.mean, 0.0)
    var = xp.where(known, state.var, 0.0)

    new_count = xp.where(learn & warm, count + 1, count)
    divisor = numerics.as_float(xp.where(new_count > 0, new_count, 1), xp=xp)
    rate = numerics.complement(config.ema_decay, norm)
    gap = value - mean
    mean = mean + xp.where(learn, _step(gap, divisor, rate, warm, xp=xp), 0.0)
    new_gap = value - mean
    square = numerics.product(xp.where(warm, gap, new_gap), new_gap, xp=xp)
    deviation = square - var
    step = _step(deviation, divisor, rate, warm, xp=xp)
    var = var + xp.where(learn, step, 0.0)
    # Rounding can give a variance of -1e-12 after equal values.
    var = xp.where(var > 0, var, 0.0)
    # If the step is not learnt, the baseline stays as it is after an expected change.
    mean, var = xp.where(learn, mean, state.mean), xp.where(learn, var, state.var)
    mean, var = numerics.settle(mean, xp=xp), numerics.settle(var, xp=xp)
    return state._replace(count=new_count, mean=mean, var=var)


def _step(gap: Any, count: Any, rate: Any, warm: Any, *, xp: Any) -> Any:
    """Change of an average: `gap / count` where `warm` (a plain mean), else `rate * gap`."""
    plain = numerics.quotient(gap, count, xp=xp)
    return xp.where(warm, plain, numerics.product(rate, gap, xp=xp))
