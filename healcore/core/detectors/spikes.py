"""Detectors of spikes of the loss and of the gradient norm, whose threshold adapts to the run.

The unit in which the detectors of spikes and trends measure a rise is the noise of the signal. A
detector calls `begin_noise`, compares its value with `noise_unit`, and then calls `learn_noise`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core.array_namespace import (
    SIGNAL_LIMIT,
    Flag,
    Float,
    Int,
    Number,
    one_like,
    xp,
)
from healcore.core.decision import Cause, DetectorResult
from healcore.core.ranges import Positive, Range, Steps
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init

SMALL_NOISE = 0.001
"""Smallest noise, as a share of the level: a smaller change is never an outlier."""
NOISE_WINDOW = 36
"""Number of values that determine the noise."""


class NoiseState(NamedTuple):
    """Noise around a moving level that need not be known.

    The noise is the mean absolute difference of successive values. Neither a trend nor a plateau
    adds to it (von Neumann et al., 1941). A repeated value is not learnt, so the noise of a rounded
    log is at least its rounding step.
    """

    count: Int
    """Values learnt, at most the window."""
    last: Float
    """The last value."""
    noise: Float
    """Mean absolute difference of successive values."""


def begin_noise(state: NoiseState, value: Float, restart: Flag) -> tuple[NoiseState, Flag]:
    """Prepares the state for a value. A restart resets the count and keeps the noise.

    Args:
        state: the state before the value.
        value: float32 0-d.
        restart: whether a change was expected at this step, bool 0-d.

    Returns:
        The state, and whether the value is the first one, bool 0-d. The first value has no
        difference to an earlier one.
    """
    count = xp.where(restart, 0, state.count)
    first = count == 0
    return state._replace(count=count, last=xp.where(first, value, state.last)), first


def noise_unit(state: NoiseState, level: Float, min_share: Number) -> Float:
    """Returns the unit in which spikes and trends are measured: the noise, with a floor.

    Without the floor, a run that is almost without noise would raise an alarm at each small rise.

    Args:
        state: the noise.
        level: the level of the values, float32 0-d.
        min_share: smallest noise, as a share of the level.

    Returns:
        float32 0-d, in the unit of the values. 0 if all values were zero.
    """
    return xp.maximum(state.noise, xp.product(min_share, abs(level)))


def learn_noise(
    state: NoiseState, value: Float, allowed: Flag, max_jump: Float, window: Number
) -> tuple[NoiseState, Float]:
    """Learns a value: its difference to the last value moves the noise.

    Args:
        state: the state from `begin_noise`.
        value: float32 0-d, finite where `allowed` holds.
        allowed: whether the value is learnt, bool 0-d.
        max_jump: largest difference that counts, float32 0-d. One outlier would otherwise raise
            the noise, and hide the outliers after it.
        window: number of values that determine the noise.

    Returns:
        The new state, and the weight of this value, float32 0-d: 1 / count, but at least
        1 / window. The weight may be infinite where `allowed` does not hold.
    """
    value = xp.where(allowed, value, state.last)  # without a jump the noise stays
    count = xp.minimum(state.count + allowed, window)
    weight = xp.quotient(one_like(value), xp.as_float(count))
    jump = abs(value - state.last)
    step = xp.product(weight, xp.minimum(jump, max_jump) - state.noise)
    noise = state.noise + xp.where(jump > 0, step, 0.0)
    return NoiseState(count, value, xp.flush(noise)), weight


# -- spikes -----------------------------------------------------------------------------------

THRESHOLD_GAIN = 0.2
"""Increase of the threshold per full vote, as a share of the threshold."""
TARGET_VOTE = 1.0 / 256.0
"""Mean vote at which the threshold settles."""
ESCAPE_WINDOWS = 2
"""Windows after which the level of a sustained spike becomes the level."""
_INFINITE = float("inf")
MIN_THRESHOLD_SHARE = 0.5
"""Smallest threshold, as a share of `z_threshold`."""


class SpikeState(NamedTuple):
    """The level, the threshold and the votes, which adapt to the run.

    A spike of the loss or the gradient norm is one outlier, or several outliers within a short time
    (docs/detectors.md). The level rises slowly, and falls at once to the higher of two successive
    values. A value above the threshold is an outlier. The threshold is a streaming quantile
    (Robbins and Monro, 1951) of the run's own values, so that recurring outliers become noise. Each
    value has a vote between 0 and 1. A full vote is an `alarm`. A decayed sum of votes above
    `evidence` is `sustained`.
    """

    values: NoiseState
    """The noise around the level."""
    level: Float
    """The level of the values, which rises slowly and falls at once."""
    threshold: Float
    """Height of an outlier above the level, in units of the noise."""
    votes: Float
    """Decayed sum of the votes."""
    lasting: Int
    """Values since the spike became sustained; 0 = not sustained."""


def _judge(
    config: LossSpikeConfig | GradSpikeConfig, state: SpikeState, seen: CheckedSignals
) -> tuple[SpikeState, DetectorResult]:
    """The method `update` of both detectors: judges the signal in `NEEDS`, then learns it.

    Args:
        config: the detector.
        state: the state before the step, 0-d.
        seen: the signals of the step. Reads the signal in `NEEDS`, `finite` and `restart`.

    Returns:
        The state after the step, and the result. An alarm is a full vote; it is sustained if the
        sum of the votes is above `evidence`. `z` is the height of the loss above the level in units
        of the noise, for `Telemetry`.
    """
    value, learn, z_loss = seen.loss, seen.finite, None
    if "grad_norm" in config.NEEDS:
        value = seen.grad_norm
        learn = learn & (value > 0)
    values, first = begin_noise(state.values, value, seen.restart)
    judged = learn & ~(values.count < config.window)
    threshold = xp.where(first, config.z_threshold, state.threshold)
    level, votes = state.level, state.votes

    unit = noise_unit(values, level, config.min_noise)
    known = unit > 0
    gap = value - level
    # A value that is not judged has the score 0, and therefore no vote.
    z = xp.quotient(gap, xp.where(known & judged, unit, _INFINITE))
    vote = xp.clip(xp.quotient(z - threshold, threshold), 0.0, 1.0)

    max_gap = xp.where(known, xp.product(threshold, unit), SIGNAL_LIMIT)
    new_values, weight = learn_noise(values, value, learn, max_gap, config.window)
    new_votes = votes - xp.product(weight, votes) + vote
    new_votes = xp.minimum(new_votes, one_like(vote) + config.evidence)
    votes = xp.where(learn, new_votes, votes)
    sustained = votes > config.evidence
    lasting = xp.where(sustained, state.lasting + learn, 0)
    restarts = (lasting >= ESCAPE_WINDOWS * config.window) | first

    rise = xp.product(weight, xp.minimum(gap, max_gap))
    higher_of_two = xp.maximum(value, values.last)
    new_level = xp.where(gap > 0, level + rise, xp.minimum(level, higher_of_two))
    level = xp.where(learn, new_level, level)
    factor = THRESHOLD_GAIN * (vote - TARGET_VOTE)
    learnt = threshold + xp.product(threshold, factor)
    learnt = xp.maximum(learnt, MIN_THRESHOLD_SHARE * config.z_threshold)
    new = SpikeState(
        new_values,
        xp.flush(xp.where(restarts, value, level)),
        xp.where(judged & ~sustained, learnt, threshold),
        xp.flush(xp.where(restarts, 0.0, votes)),
        xp.where(restarts, 0, lasting),
    )
    if "loss" in config.NEEDS:
        z_loss = z
    return new, DetectorResult(vote >= 1, sustained & (vote > 0), z=z_loss)


class LossSpikeConfig(NamedTuple):
    """Thresholds of the loss-spike detector: one bad batch, or a sustained rise above the noise.

    The threshold is in units of the noise, so the same numbers fit any task and unit of the loss.
    """

    z_threshold: Positive = 5.5
    """Height above the level, in units of the noise, from which a value is an outlier. A
    value at twice this height has a full vote. Frequent outliers raise the threshold."""
    evidence: Annotated[Number, Range(gt=0, le=15)] = 2.0
    """Sum of votes above which a spike is sustained."""
    window: Steps = NOISE_WINDOW
    """Number of values learnt before any is judged; later values have the weight 1 / window."""
    min_noise: Positive = SMALL_NOISE
    """Smallest noise, as a share of the level."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = ("loss",)
    init = zero_init(SpikeState)
    update = _judge


class GradSpikeConfig(NamedTuple):
    """Thresholds of the gradient-spike detector: a global norm far above its recent level.

    The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations
    before the loss peak). Norms of 0 are neither judged nor learnt.
    """

    z_threshold: Positive = 5.5
    """As `LossSpikeConfig.z_threshold`."""
    evidence: Annotated[Number, Range(gt=0, le=15)] = 2.0
    """As `LossSpikeConfig.evidence`."""
    window: Steps = NOISE_WINDOW
    """As `LossSpikeConfig.window`."""
    min_noise: Positive = 0.18
    """Smallest noise, as a share of the level: an alarm is three times the level or more."""

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = ("grad_norm",)
    init = zero_init(SpikeState)
    update = _judge
