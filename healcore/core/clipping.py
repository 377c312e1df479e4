"""Clipping rules, which run on the device at every step: fixed, ZClip, AutoClip, AdaGC.

A rule is a NamedTuple of numbers, which may be arrays. `init(groups=n)` returns the state as NumPy
arrays. `update(state, seen, learn)` judges a norm against the state, then learns the norm
where `learn` holds (the step is not skipped). It returns the new state and a `Clip`. Attributes of
the class say what the engine and the adapters have to know about a rule:

    attribute           fixed  zclip  autoclip  adagc
    per_tensor          no     no     no        yes     judges `group_norms`, one per tensor
    is_fixed            yes    no     no        no      `max_norm` is the whole rule; learns nothing
    limits_every_step   yes    yes    yes       no      no step is above `max_norm`, where it is set
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from healcore.core import baseline
from healcore.core.array_namespace import Flag, Float, Int, Number, complement, xp, zero_like
from healcore.core.ranges import Fraction, Limit, NotNegative, Positive, Range, Ratio, Steps
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init, zeros

EPSILON = 1e-6  # added to the norm, as in torch and in the papers


class Clip(NamedTuple):
    """Clipping of one step: arrays of the norm's shape, 0-d, or (n,) for per-tensor rules.

    A rule only says how to scale. The engine combines it with the other decisions of the step, and
    the adapter scales the gradients.
    """

    scale: Float
    """From 0 to 1: factor on the gradient; 1 = unchanged."""
    clipped: Flag
    """Whether the norm is above the threshold."""
    threshold: Float | None = None
    """Norm above which the gradient is clipped; 0 = no limit (warm-up). None for AdaGC."""
    z: Float | None = None
    """z-score of the norm; 0 in warm-up. None for rules without a variance."""


def scale_to(limit: Float, norm: Float, over: Flag) -> Float:
    """Returns the factor that reduces a norm to a limit.

    Args:
        limit: the norm after clipping.
        norm: the norm before clipping, of the same shape.
        over: whether the norm is clipped. Elsewhere the factor is exactly 1.

    Returns:
        float32 of the norm's shape, from 0 to 1. A subnormal factor is 0, in every backend.
    """
    target = xp.where(over, limit, norm)
    scale = xp.quotient(target, norm + EPSILON)
    return xp.flush(xp.where(over, scale, 1.0))


class FixedConfig(NamedTuple):
    """Parameter of fixed clipping, the usual rule of training loops (Pascanu et al., 2013).

    Reduces the norm to one absolute limit, as `torch.nn.utils.clip_grad_norm_` and
    `optax.clip_by_global_norm` do. The rule has no memory, so norms that stay above `max_norm` are
    always clipped, as configured.

    The limit that your loop already uses is the right number here.
    """

    max_norm: Positive = 1.0
    """Largest gradient norm that is not clipped; above 0."""

    kind = "fixed"
    per_tensor, is_fixed, limits_every_step = False, True, True
    init = zero_init(tuple)

    def update(self, state: Any, seen: CheckedSignals, learn: Flag) -> tuple[Any, Clip]:
        """Clips `seen.grad_norm` to `max_norm`.

        Args:
            state: the empty state.
            seen: the signals of the step. Reads `grad_norm`.
            learn: not needed, because the rule learns nothing.

        Returns:
            The same state, and the clipping of this step.
        """
        del learn
        norm = seen.grad_norm
        over = norm > self.max_norm
        scale = scale_to(self.max_norm, norm, over)
        return state, Clip(scale, over, zero_like(norm) + self.max_norm)


class ZClipState(NamedTuple):
    """Statistics of the accepted norms, with which the next norm is compared.

    A clipped norm is learnt as its limit, so one spike hardly moves them. A lasting shift of the
    norms is accepted by `baseline.watch_level`.
    """

    count: Int
    """Norms learnt, at most `warmup_steps`."""
    mean: Float
    """Mean during warm-up, then its moving average."""
    var: Float
    """Population variance during warm-up, then its moving average."""
    shift: baseline.ShiftState
    """The count of clipped norms, by which the mean follows a lasting level shift."""


class ZClipConfig(NamedTuple):
    """Parameters of ZClip: clips a norm that is unusually large for its history.

    From Kumar et al., 2025, arXiv:2504.02507, package `zclip` 1.0.0. The first `warmup_steps` raw
    norms give the mean mu and the population variance v. With z = (g - mu) / sqrt(v), a norm with z
    above the threshold k is reduced to T: `mu + k^2 sigma / z` (reciprocal), `mu` (mean) or
    `mu + k sigma` (max). Then mu' = a mu + (1 - a) u and v' = a v + (1 - a) (u - mu')^2, where u is
    T for a clipped norm, else g. Differences from the paper (reasons and numbers:
    docs/detectors.md, docs/recipes.md):

    * The baseline follows lasting level shifts, and the warm-up is robust (`baseline`).
    * NaN, Inf and zero norms are not learnt, and sigma is at least `min_rel_std` of mu. In the
      published rule one NaN disables clipping permanently, and a series of zeros clips to zero.
    """

    z_threshold: Positive = 2.5
    """z-score above which a norm is a spike (paper: 2.5; 2.0 at learning rates >= 3e-3)."""
    ema_decay: Fraction = 0.97
    """Decay of mean and variance per step, in (0, 1)."""
    warmup_steps: Steps = 25
    """Number of positive finite norms averaged before the z-score is used."""
    target: Literal["reciprocal", "mean", "max"] = "reciprocal"
    """Norm to which a spike is reduced: reciprocal, mean or max. Static."""
    max_norm: Limit = 1.0
    """Additional absolute limit, also during the warm-up, or None."""
    min_rel_std: NotNegative = 0.01
    """Floor of sigma as a fraction of the mean."""
    shift: baseline.ShiftConfig = baseline.ShiftConfig()
    """When repeatedly clipped norms become the new level."""

    kind = "zclip"
    per_tensor, is_fixed, limits_every_step = False, False, True
    init = zero_init(ZClipState)

    def update(
        self, state: ZClipState, seen: CheckedSignals, learn: Flag
    ) -> tuple[ZClipState, Clip]:
        """Judges `seen.grad_norm`, then learns it.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.
            learn: whether the norm may be learnt, bool 0-d. False for a step that is skipped.

        Returns:
            The state after the step, and the clipping of this step.
        """
        norm = seen.grad_norm
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        # Separate products, and the floor again after the root, because XLA rewrites (c m)(c m) as
        # (m m) c^2, and sqrt(x x) as |x|.
        floor = xp.product(self.min_rel_std, state.mean)
        var = xp.maximum(state.var, xp.product(floor, floor))
        sigma = xp.maximum(xp.sqrt(state.var), floor)

        # z > k without a root: gap^2 > k^2 v. With two products a Python number and an array (a
        # vmapped sweep) round alike, and XLA does not compute (k k) v.
        k = self.z_threshold
        gap = norm - state.mean
        limit = k * xp.product(k, var)
        spike = ~warm & (gap > 0) & (gap * gap > limit)
        safe_gap = xp.where(spike, gap, 1.0)
        if self.target == "reciprocal":
            target = state.mean + xp.where(spike, xp.quotient(limit, safe_gap), 0.0)
        elif self.target == "mean":
            target = state.mean
        else:
            target = state.mean + xp.where(spike, xp.product(k, sigma), 0.0)

        accepted = xp.where(spike, target, norm)
        effective = accepted
        threshold = xp.where(warm, 0.0, state.mean + xp.product(k, sigma))
        if self.max_norm is not None:
            effective = xp.minimum(effective, self.max_norm)
            lower = (threshold == 0) | (threshold > self.max_norm)
            threshold = xp.where(lower, self.max_norm, threshold)
        over = norm > effective
        scale = scale_to(effective, norm, over)
        known = ~warm & (sigma > 0)
        z = xp.where(known, xp.quotient(gap, xp.where(known, sigma, 1.0)), 0.0)

        learn = learn & seen.finite & (norm > 0)
        learnt = _learn(self, state, count, norm, accepted, learn)
        shift, escaped = baseline.watch_level(
            self.shift, state.shift, norm, spike, learn & ~warm, seen.restart
        )
        return ZClipState(
            count=learnt.count,
            mean=xp.where(escaped, shift.level, learnt.mean),
            var=xp.where(escaped, shift.spread, learnt.var),
            shift=shift,
        ), Clip(scale, over, threshold, z)


def _learn(
    config: ZClipConfig, state: ZClipState, count: Int, norm: Float, accepted: Float, learn: Flag
) -> ZClipState:
    """Updates mean and variance: Welford during warm-up, then moving averages."""
    warm = count < config.warmup_steps
    value, first_were_outliers = baseline.limit_outlier(accepted, state.mean, count, warm)
    count = xp.where(learn & first_were_outliers, 0, count)
    known = count > 0
    mean = xp.where(known, state.mean, 0.0)
    var = xp.where(known, state.var, 0.0)

    new_count = xp.where(learn & warm, count + 1, count)
    divisor = xp.as_float(xp.where(new_count > 0, new_count, 1))
    rate = complement(config.ema_decay, norm)
    gap = value - mean
    mean = mean + xp.where(learn, _step(gap, divisor, rate, warm), 0.0)
    new_gap = value - mean
    square = xp.product(xp.where(warm, gap, new_gap), new_gap)
    deviation = square - var
    step = _step(deviation, divisor, rate, warm)
    var = var + xp.where(learn, step, 0.0)
    # Rounding can give a variance of -1e-12 after equal values.
    var = xp.where(var > 0, var, 0.0)
    # If the step is not learnt, the baseline stays as it is after an expected change.
    mean, var = xp.where(learn, mean, state.mean), xp.where(learn, var, state.var)
    mean, var = xp.flush(mean), xp.flush(var)
    return state._replace(count=new_count, mean=mean, var=var)


def _step(gap: Float, count: Float, rate: Float, warm: Flag) -> Float:
    """Change of an average: `gap / count` where `warm` (a plain mean), else `rate * gap`."""
    plain = xp.quotient(gap, count)
    return xp.where(warm, plain, xp.product(rate, gap))


_PER_OCTAVE = 16
_OCTAVES = 32  # 2**-32 to 2**32
EDGES = np.exp2(
    np.arange(-_OCTAVES * _PER_OCTAVE, _OCTAVES * _PER_OCTAVE + 1) / _PER_OCTAVE
).astype(np.float32)
"""Edges of the bins; a namespace of a device keeps this table on the device."""
BINS = len(EDGES) - 1  # number of bins


class AutoClipState(NamedTuple):
    """Histogram of the recent norms, from which the percentile is read.

    The paper sorts the whole history instead, which grows with the run. A compiled step needs
    arrays of a fixed size.
    """

    counts: Int
    """(BINS,): norms per bin."""


class AutoClipConfig(NamedTuple):
    """Parameters of AutoClip: clips at a percentile of the recent norms.

    From Seetharaman et al., 2020, arXiv:2007.14469. With a percentile of 10, about nine of ten
    steps are clipped, so that most steps have similar lengths. ZClip instead clips rare outliers
    only.

    The original sorts the whole history at each step. This version keeps a histogram of 16 bins per
    octave: O(1) memory, integer counts that are equal in every backend, and a percentile at most
    one bin (4.4 %) too high. At `2 * window` norms all counts are halved, so that the rule follows
    a lasting level shift within five windows. As published, raw norms enter: clipped norms would
    lower the percentile further and further.
    """

    percentile: Annotated[Number, Range(gt=0, lt=100)] = 10.0
    """Percentile of the recent norms at which norms are clipped, in (0, 100)."""
    window: Steps = 200
    """The histogram covers between one and two times this many norms."""
    max_norm: Limit = None
    """Additional absolute limit, or None."""

    kind = "autoclip"
    per_tensor, is_fixed, limits_every_step = False, False, True
    init = zero_init(AutoClipState, (BINS,))

    def update(
        self, state: AutoClipState, seen: CheckedSignals, learn: Flag
    ) -> tuple[AutoClipState, Clip]:
        """Adds `seen.grad_norm` to the histogram, then clips it at the percentile.

        Args:
            state: the state before the step: counts (BINS,).
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.
            learn: whether the norm may be learnt, bool 0-d. False for a step that is skipped.

        Returns:
            The state after the step, and the clipping of this step.
        """
        norm = seen.grad_norm
        learn = learn & seen.finite & (norm > 0)
        edges = xp.table(EDGES, norm)
        above = norm[..., None] >= edges
        index = xp.sum(xp.as_int(above), -1) - 1
        index = xp.clip(index, 0, BINS - 1)
        hit = (xp.places(state.counts) == index[..., None]) & learn[..., None]

        counts = xp.where(seen.restart[..., None], 0, state.counts)
        counts = xp.where(hit, counts + 1, counts)
        total = xp.sum(counts, -1)
        full = total >= 2 * self.window
        percentile = _percentile(self.percentile, counts, total, edges)

        known = total > 0
        target = xp.where(known, percentile, norm)
        threshold = xp.where(known, percentile, 0.0)
        if self.max_norm is not None:
            target = xp.minimum(target, self.max_norm)
            threshold = xp.where(known, target, self.max_norm)
        over = norm > target
        new_counts = xp.where(full[..., None], counts // 2, counts)
        return AutoClipState(xp.as_int(new_counts)), Clip(
            scale_to(target, norm, over), over, zero_like(norm) + threshold
        )


def _percentile(percent: Number, counts: Int, total: Int, edges: Float) -> Float:
    """Upper edge of the bin that holds the percentile.

    Interpolation would clip equal norms forever, by up to the width of a bin. The last sum has only
    one term other than zero, so its order does not matter.
    """
    below = xp.as_float(xp.cumsum(counts, -1))
    rank = xp.product(percent, xp.as_float(total)) * 0.01
    before = below - xp.as_float(counts)
    in_bin = (below >= rank[..., None]) & (before < rank[..., None])
    return xp.sum(xp.where(in_bin, edges[1:], 0.0), -1)


# A ratio of 1.04 rejects more than half of all noisy norms. So an accepted norm cancels eight
# rejections.
_SHIFT = baseline.ShiftConfig(patience=25, gain=1, forgive=8)


class AdaGCState(NamedTuple):
    """State of n tensors: how large the norm of each tensor usually is.

    A tensor has a level of its own, because norms differ by orders of magnitude between layers. One
    limit for all would clip only the largest layers.
    """

    count: Int
    """Steps learnt, at most `warmup_steps`."""
    gamma: Float
    """(n,): level of each tensor's norm; 0 = no norm seen."""
    shift: baseline.ShiftState
    """Arrays of shape (n,)."""


class AdaGCConfig(NamedTuple):
    """Parameters of AdaGC: clips each tensor's gradient by the history of its own norm.

    From Wang et al., 2025, arXiv:2502.11034. For the first `warmup_steps` the global norm is
    clipped to `max_norm`, and gamma_i is the smallest clipped norm of tensor i. Then a norm above
    `ratio * gamma_i` is clipped to it, and gamma_i' = decay gamma_i + (1 - decay) u_i for the
    clipped norm u_i. Differences from the paper (docs/recipes.md): zero and non-finite norms are
    not learnt, a tensor first seen after warm-up starts from its own first norm, and gamma follows
    lasting level shifts.
    """

    ratio: Ratio = 1.04
    """Multiple of gamma to which larger norms are clipped (the paper's lambda_rel)."""
    ema_decay: Fraction = 0.99
    """Decay of gamma per step (the paper's beta)."""
    warmup_steps: Steps = 100
    """Steps of global clipping (the paper's T_start)."""
    max_norm: Positive = 1.0
    """Global limit during warm-up (the paper's lambda_abs)."""
    shift: baseline.ShiftConfig = _SHIFT
    """When repeatedly clipped norms become the new level of a tensor."""

    kind = "adagc"
    per_tensor, is_fixed, limits_every_step = True, False, False

    def init(self, *, groups: int = 0) -> AdaGCState:
        """Makes the state at the start of the warm-up.

        Args:
            groups: number of tensors.
        """
        return zeros(AdaGCState, (groups,))._replace(count=np.zeros((), np.int32))

    def update(
        self, state: AdaGCState, seen: CheckedSignals, learn: Flag
    ) -> tuple[AdaGCState, Clip]:
        """Judges the norm of each tensor, then learns it.

        Args:
            state: the state before the step.
            seen: the signals of the step. Reads `group_norms` (n,), `grad_norm`, `finite` and
                `restart`.
            learn: whether the norms may be learnt, bool 0-d. False for a step that is skipped.

        Returns:
            The state after the step, and the clipping of this step, in arrays of shape (n,).
        """
        norms = seen.group_norms
        count = xp.where(seen.restart, 0, state.count)
        warm = count < self.warmup_steps
        learn = learn & seen.finite
        over_global = seen.grad_norm > self.max_norm
        global_scale = scale_to(self.max_norm, seen.grad_norm, over_global)

        warm_n, global_scale_n, learn_n = warm[..., None], global_scale[..., None], learn[..., None]
        restart_n = seen.restart[..., None]
        gamma = xp.where(restart_n, 0.0, state.gamma)
        unknown = gamma == 0
        limit = self.ratio * gamma
        over = ~warm_n & ~unknown & (norms > limit)
        tensor_scale = scale_to(limit, norms, over)
        scale = xp.where(warm_n, global_scale_n, tensor_scale)

        learn_n = learn_n & (norms > 0)
        accepted = xp.where(over, limit, norms)
        clipped = xp.flush(norms * global_scale_n)
        lowest = xp.where(unknown, clipped, xp.minimum(gamma, clipped))
        rate = complement(self.ema_decay, norms)
        moved = xp.where(unknown, norms, xp.ema(gamma, accepted, rate, learn_n))
        gamma = xp.where(learn_n, xp.where(warm_n, lowest, moved), gamma)
        shift, escaped = baseline.watch_level(
            self.shift, state.shift, norms, over, learn_n & ~warm_n, restart_n
        )
        gamma = xp.where(escaped, shift.level, gamma)
        count = xp.where(learn & warm & (seen.grad_norm > 0), count + 1, count)
        return AdaGCState(count, gamma, shift), Clip(
            scale, (warm_n & over_global[..., None]) | over
        )
