"""Spikes of the loss, the gradient norm and the update norm (docs/detectors.md).

A spike is one outlier, or several outliers within a short time. The level rises slowly, and falls
at once to the higher of two successive values. A value above the threshold is an outlier. The
threshold is a streaming quantile (Robbins and Monro, 1951) of the run's own values, so that
recurring outliers become noise. Each value has a vote between 0 and 1. A full vote is an `alarm`. A
decayed sum of votes above `evidence` is `sustained`.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from healcore.core import baseline, numerics
from healcore.core.ranges import Positive, Steps, number
from healcore.core.signals import Observed
from healcore.core.tree import Float, Int, zero_init
from healcore.core.verdict import Cause, Reading

THRESHOLD_GAIN = 0.2  # increase of the threshold per full vote, as a share of the threshold
TARGET_VOTE = 1.0 / 256.0  # mean vote at which the threshold settles
ESCAPE_WINDOWS = 2  # windows after which the level of a sustained spike becomes the level
_INFINITE = float("inf")
MIN_THRESHOLD_SHARE = 0.5  # smallest threshold, as a share of `z_threshold`


class SpikeState(NamedTuple):
    """The level, the threshold and the votes."""

    values: baseline.NoiseState
    level: Float
    threshold: Float  # height of an outlier above the level, in units of the noise
    votes: Float  # decayed sum of the votes
    lasting: Int  # values since the spike became sustained; 0 = not sustained


class LossSpikeConfig(NamedTuple):
    """One bad batch, or a sustained rise of the loss above the run's own noise."""

    z_threshold: Positive = 5.5
    """Height above the level, in units of the noise, from which a value is an outlier; at twice
    the height its vote is full. The run's own outliers move the threshold."""
    evidence: Annotated[Any, number(above=0, most=15)] = 2.0
    """Sum of votes above which a spike is sustained."""
    window: Steps = baseline.NOISE_WINDOW
    """Number of values learnt before any is judged; later values have the weight 1 / window."""
    min_noise: Positive = baseline.SMALL_NOISE
    """Smallest noise, as a share of the level."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})
    init = zero_init(SpikeState)

    def update(self, state: SpikeState, seen: Observed, *, xp: Any) -> tuple[SpikeState, Reading]:
        """Judges `seen.loss`, then learns it. The reading's `z` is in units of the noise."""
        return _judge(self, state, seen.loss, seen.finite, seen.restart, xp=xp)


class GradSpikeConfig(NamedTuple):
    """A global gradient norm far above its recent level.

    The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations
    before the loss peak). Norms of 0 are neither judged nor learnt.
    """

    z_threshold: Positive = LossSpikeConfig().z_threshold
    evidence: Annotated[Any, number(above=0, most=15)] = LossSpikeConfig().evidence
    window: Steps = LossSpikeConfig().window
    min_noise: Positive = 0.18
    """Smallest noise, as a share of the level: an alarm is three times the level or more."""

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})
    init = zero_init(SpikeState)

    def update(self, state: SpikeState, seen: Observed, *, xp: Any) -> tuple[SpikeState, Reading]:
        """Judges the norm, then learns it."""
        (signal,) = self.NEEDS
        norm = getattr(seen, signal)
        return _judge(self, state, norm, seen.finite & (norm > 0), seen.restart, xp=xp)


class UpdateSpikeConfig(GradSpikeConfig):
    """A norm of the last update far above the norms of recent updates.

    Marin 32B had update-norm spikes before its loss spikes, despite clipping and skipping. With a
    decayed second moment an ordinary gradient makes a huge step, which no gradient norm shows.
    """

    CAUSE = Cause.UPDATE_SPIKE
    NEEDS = frozenset({"update_norm"})


def _judge(
    config: Any, state: SpikeState, value: Any, learn: Any, restart: Any, *, xp: Any
) -> tuple[SpikeState, Reading]:
    """Judges `value` (float32, finite where `learn` holds), then learns it."""
    values, first = baseline.begin_noise(state.values, value, restart, xp=xp)
    judged = numerics.and_not(learn, values.count < config.window)
    threshold = xp.where(first, config.z_threshold, state.threshold)
    level, votes = state.level, state.votes

    unit = baseline.noise_unit(values, level, config.min_noise, xp=xp)
    known = unit > 0
    gap = value - level
    # A value that is not judged has the score 0, and therefore no vote.
    z = numerics.quotient(gap, xp.where(known & judged, unit, _INFINITE), xp=xp)
    vote = xp.clip(numerics.quotient(z - threshold, threshold, xp=xp), 0.0, 1.0)

    max_gap = xp.where(known, numerics.product(threshold, unit, xp=xp), numerics.HUGE)
    new_values, weight = baseline.learn_noise(values, value, learn, max_gap, config.window, xp=xp)
    new_votes = votes - numerics.product(weight, votes, xp=xp) + vote
    new_votes = xp.minimum(new_votes, numerics.plus_one(config.evidence))
    votes = xp.where(learn, new_votes, votes)
    sustained = votes > config.evidence
    lasting = xp.where(sustained, state.lasting + learn, 0)
    restarts = (lasting >= ESCAPE_WINDOWS * config.window) | first

    rise = numerics.product(weight, xp.minimum(gap, max_gap), xp=xp)
    higher_of_two = xp.maximum(value, values.last)
    new_level = xp.where(gap > 0, level + rise, xp.minimum(level, higher_of_two))
    level = xp.where(learn, new_level, level)
    factor = THRESHOLD_GAIN * (vote - TARGET_VOTE)
    learnt = threshold + numerics.product(threshold, factor, xp=xp)
    learnt = xp.maximum(learnt, MIN_THRESHOLD_SHARE * config.z_threshold)
    new = SpikeState(
        new_values,
        numerics.settle(xp.where(restarts, value, level), xp=xp),
        xp.where(numerics.and_not(judged, sustained), learnt, threshold),
        numerics.settle(xp.where(restarts, 0.0, votes), xp=xp),
        xp.where(restarts, 0, lasting),
    )
    return new, Reading(vote >= 1, sustained & (vote > 0), z=z)
