"""Detectors of spikes of the loss and of the gradient norm, whose threshold adapts to the run."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core import numerics
from healcore.core.array_namespace import Flag, Float, Int, Number, xp
from healcore.core.decision import Cause, DetectorResult
from healcore.core.detectors.noise import (
    NOISE_WINDOW,
    SMALL_NOISE,
    NoiseState,
    begin_noise,
    learn_noise,
    noise_unit,
)
from healcore.core.ranges import Positive, Steps, number
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init

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


class LossSpikeConfig(NamedTuple):
    """Thresholds of the loss-spike detector: one bad batch, or a sustained rise above the noise.

    The threshold is in units of the noise, so the same numbers fit any task and unit of the loss.
    """

    z_threshold: Positive = 5.5
    """Height above the level, in units of the noise, from which a value is an outlier. A
    value at twice this height has a full vote. Frequent outliers raise the threshold."""
    evidence: Annotated[Number, number(above=0, at_most=15)] = 2.0
    """Sum of votes above which a spike is sustained."""
    window: Steps = NOISE_WINDOW
    """Number of values learnt before any is judged; later values have the weight 1 / window."""
    min_noise: Positive = SMALL_NOISE
    """Smallest noise, as a share of the level."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = ("loss",)
    init = zero_init(SpikeState)

    def update(self, state: SpikeState, seen: CheckedSignals) -> tuple[SpikeState, DetectorResult]:
        """Judges `seen.loss`, then learns it.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.

        Returns:
            The state after the step, and the result. An alarm is a full vote; it is sustained if
            the sum of the votes is above `evidence`. `z` is the height above the level in units of
            the noise.
        """
        return _judge(self, state, seen.loss, seen.finite, seen.restart)


class GradSpikeConfig(NamedTuple):
    """Thresholds of the gradient-spike detector: a global norm far above its recent level.

    The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations
    before the loss peak). Norms of 0 are neither judged nor learnt.
    """

    z_threshold: Positive = LossSpikeConfig().z_threshold
    """As `LossSpikeConfig.z_threshold`."""
    evidence: Annotated[Number, number(above=0, at_most=15)] = LossSpikeConfig().evidence
    """As `LossSpikeConfig.evidence`."""
    window: Steps = LossSpikeConfig().window
    """As `LossSpikeConfig.window`."""
    min_noise: Positive = 0.18
    """Smallest noise, as a share of the level: an alarm is three times the level or more."""

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = ("grad_norm",)
    init = zero_init(SpikeState)

    def update(self, state: SpikeState, seen: CheckedSignals) -> tuple[SpikeState, DetectorResult]:
        """Judges `seen.grad_norm`, then learns it. Skips norms of 0.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.

        Returns:
            The state after the step, and the same result as `LossSpikeConfig.update`, without the
            score `z`: `Telemetry` has the score of the loss only.
        """
        norm = seen.grad_norm
        new, reading = _judge(self, state, norm, seen.finite & (norm > 0), seen.restart)
        return new, reading._replace(z=None)


def _judge(
    config: LossSpikeConfig | GradSpikeConfig,
    state: SpikeState,
    value: Float,
    learn: Flag,
    restart: Flag,
) -> tuple[SpikeState, DetectorResult]:
    """Judges `value` (float32, finite where `learn` holds), then learns it."""
    values, first = begin_noise(state.values, value, restart)
    judged = learn & ~(values.count < config.window)
    threshold = xp.where(first, config.z_threshold, state.threshold)
    level, votes = state.level, state.votes

    unit = noise_unit(values, level, config.min_noise)
    known = unit > 0
    gap = value - level
    # A value that is not judged has the score 0, and therefore no vote.
    z = xp.quotient(gap, xp.where(known & judged, unit, _INFINITE))
    vote = xp.clip(xp.quotient(z - threshold, threshold), 0.0, 1.0)

    max_gap = xp.where(known, xp.product(threshold, unit), numerics.SIGNAL_LIMIT)
    new_values, weight = learn_noise(values, value, learn, max_gap, config.window)
    new_votes = votes - xp.product(weight, votes) + vote
    new_votes = xp.minimum(new_votes, numerics.one_like(vote) + config.evidence)
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
    return new, DetectorResult(vote >= 1, sustained & (vote > 0), z=z)
