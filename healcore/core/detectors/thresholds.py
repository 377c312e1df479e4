"""Detectors that compare each value with a threshold: fixed, of the first steps, or adaptive.

A fixed limit is the user's choice and has no escape. `grad_ceiling` learns its first norms again
after `escape` alarms in a row.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, NamedTuple

from healcore.core import numerics, ranges
from healcore.core.array_namespace import ArrayNamespace, Flag, Float, Int, Number
from healcore.core.decision import NONFINITE, Cause, Reading
from healcore.core.numerics import zero_init
from healcore.core.ranges import Positive, Steps, number
from healcore.core.signals import Observed


class NonFiniteState(NamedTuple):
    """No state: each step is judged by itself."""


class NonFiniteConfig(NamedTuple):
    """NaN or infinite loss or gradient, and norms that overflowed float32.

    Every such step is an alarm. The rule's `when` sets how many are too many, in a row or within a
    window. The window detects a run in which every other step is NaN. It needs no signal of its
    own: a loss or a norm is always there.
    """

    CAUSE = NONFINITE
    NEEDS = frozenset()
    init = zero_init(NonFiniteState)

    def update(
        self, state: NonFiniteState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[NonFiniteState, Reading]:
        """Reads the flags of `seen`.

        Args:
            state: the empty state.
            seen: the signals of the step. Reads `bad`, `bad_grad` and `bad_loss`.
            xp: the array namespace.

        Returns:
            The same state, and the reading, whose cause says whether loss, gradient or both are not
            finite. An alarm is sustained at once.
        """
        flags = []
        if seen.bad_grad is not None:
            flags.append(xp.flag(seen.bad_grad, Cause.NONFINITE_GRAD))
        if seen.bad_loss is not None and flags:
            flags.append(seen.bad_loss)  # combined with an int32, a bool is the flag 1
        elif seen.bad_loss is not None:
            flags.append(xp.flag(seen.bad_loss, 1))
        return state, Reading(seen.bad, seen.bad, cause=functools.reduce(operator.or_, flags))


class VanishingState(NamedTuple):
    """Count of consecutive small norms."""

    run: Int
    """Consecutive steps below the threshold, at most `patience`."""


class VanishingConfig(NamedTuple):
    """A global gradient norm that stays below a threshold.

    It is a sign of a dead network, a detached graph or a loss without gradient. One tiny norm is
    normal (a fully masked batch), but `patience` tiny norms in a row are not. A norm that is not
    finite has its own detector.
    """

    threshold: ranges.Norm = 1e-7
    """Norm below which a gradient counts as vanished."""
    patience: ranges.Steps = 20
    """Consecutive steps that raise the alarm."""

    CAUSE = Cause.GRAD_VANISHING
    NEEDS = frozenset({"grad_norm"})
    init = zero_init(VanishingState)

    def update(
        self, state: VanishingState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[VanishingState, Reading]:
        """Counts steps below the threshold. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.
            xp: the array namespace.

        Returns:
            The state after the step, and the reading: an alarm from the step on at which `patience`
            norms in a row were small. An alarm is sustained at once.
        """
        vanished = seen.grad_norm < self.threshold
        longer = xp.where(state.run < self.patience, state.run + 1, state.run)
        streak = xp.where(seen.finite, xp.where(vanished, longer, 0), state.run)
        streak = xp.where(seen.restart, 0, streak)
        alarm = seen.finite & vanished & (streak >= self.patience)
        return VanishingState(streak), Reading(alarm, alarm)


class CeilingState(NamedTuple):
    """Largest of the first values, and the count of consecutive alarms.

    The state of both ceilings, of losses and of norms. The first values of a run show its scale,
    from which a ceiling may follow.
    """

    count: Int
    """Values learnt, at most `first_steps`."""
    top: Float
    """The largest learnt value."""
    run: Int
    """Consecutive alarms, at most `sustain` (losses) or `escape` (norms)."""


class LossCeilingConfig(NamedTuple):
    """A loss above a fixed level, or above all losses of the first steps.

    These are the rules of Axolotl's loss watchdog (above `loss_watchdog_threshold` at three logs in
    a row) and of the second half of llm-foundry's `KillLossSpike` (half of the window above the
    largest loss of the first window, or above 10). Here each step counts once, and NaN changes
    nothing (docs/recipes.md). The rule needs no escape, because it learns only the first steps.
    """

    ceiling: ranges.Level = None
    """Largest normal loss, or None for no fixed level."""
    first_steps: ranges.StepsOrZero = 100
    """Number of first steps whose largest loss is a second ceiling, or 0 for no such ceiling. These
    steps are not judged, because a high loss of an untrained model is normal."""
    first_ratio: ranges.Ratio = 1.0
    """Factor of the second ceiling; for a loss of at most 0 it applies to the absolute value."""
    sustain: ranges.Steps = 3
    """Consecutive steps above a ceiling that make the alarm sustained."""

    CAUSE = Cause.DIVERGENCE
    NEEDS = frozenset({"loss"})
    init = zero_init(CeilingState)

    def update(
        self, state: CeilingState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[CeilingState, Reading]:
        """Judges `seen.loss`, or learns it in the first steps. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.
            xp: the array namespace.

        Returns:
            The state after the step, and the reading: an alarm at each loss above a ceiling, which
            is sustained after `sustain` of them in a row.
        """
        learn, loss = seen.finite, seen.loss
        count = xp.where(seen.restart, 0, state.count)
        early = count < self.first_steps
        top = xp.where((count == 0) | (loss > state.top), loss, state.top)
        top = xp.where(learn & early, top, state.top)

        above = xp.product(self.first_ratio - 1.0, xp.abs(state.top))
        over = (loss > state.top + above) & (count > 0)
        if self.ceiling is not None:
            over = over | (loss > self.ceiling)
        alarm = learn & ~early & over
        streak = numerics.streak(state.run, alarm, learn, seen.restart, self.sustain, xp=xp)
        count = xp.where(learn & early, count + 1, count)
        return CeilingState(count, top, streak), Reading(alarm, alarm & (streak >= self.sustain))


class GradCeilingConfig(NamedTuple):
    """A gradient norm above an absolute limit, or many times the largest of the first norms.

    Two rules of Megatron-LM: `grad_norm_skip_threshold` (megatron/core/optimizer/optimizer.py), and
    `is_unexpectedly_large` (megatron/core/rerun_state_machine.py), ten times the largest of the
    first 100. The published rule never learns the first norms again, even if they were zeros (a
    frozen network).
    """

    ceiling: ranges.Limit = None
    """Largest normal norm, or None for no fixed limit."""
    first_ratio: ranges.RatioOrNone = 10.0
    """Smallest ratio of an outlier to the largest of the first norms, or None for no such test."""
    first_steps: ranges.Steps = 100
    """Number of first norms."""
    sustain: ranges.Steps = 5
    """Consecutive alarms that make the alarm sustained."""
    escape: ranges.Steps = 100
    """Consecutive alarms after which the first norms are learnt again."""

    AT_MOST = (("sustain", "escape"),)
    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})
    init = zero_init(CeilingState)

    def update(
        self, state: CeilingState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[CeilingState, Reading]:
        """Judges the norm, and learns the first norms. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`. A norm of 0 is
                neither judged nor learnt.
            xp: the array namespace.

        Returns:
            The state after the step, and the reading: an alarm at each outlier, which is sustained
            after `sustain` of them in a row.
        """
        norm = seen.grad_norm
        learn = seen.finite & (norm > 0)
        count = xp.where(seen.restart, 0, state.count)
        early = count < self.first_steps
        top = xp.where(count == 0, 0.0, state.top)
        outlier = norm < 0
        if self.first_ratio is not None:
            outlier = outlier | (~early & (norm >= self.first_ratio * top))
        if self.ceiling is not None:
            outlier = outlier | (norm > self.ceiling)
        alarm = learn & outlier

        streak = numerics.streak(state.run, alarm, learn, seen.restart, self.escape, xp=xp)
        sustained = alarm & (streak >= self.sustain)
        accepted = learn & early & ~alarm
        count = xp.where(accepted, count + 1, count)
        top = xp.where(accepted & (norm > top), norm, top)
        if self.first_ratio is not None:
            escaped = alarm & (streak >= self.escape)
            count, streak = xp.where(escaped, 0, count), xp.where(escaped, 0, streak)
        return CeilingState(count, top, streak), Reading(alarm, sustained)


# -- noise ----------------------------------------------------------------------------------------

SMALL_NOISE = 0.001
"""Smallest noise, as a share of the level: a smaller change is never an outlier."""
NOISE_WINDOW = 36
"""Number of values that determine the noise."""


class NoiseState(NamedTuple):
    """Noise around a moving level that need not be known.

    The mean absolute difference of successive values: neither a trend nor a plateau adds to it (von
    Neumann et al., 1941). A repeated value is not learnt, so the noise of a rounded log is at least
    its rounding step.
    """

    count: Int
    """Values learnt, at most the window."""
    last: Float
    """The last value."""
    noise: Float
    """Mean absolute difference of successive values."""


def begin_noise(
    state: NoiseState, value: Float, restart: Flag, *, xp: ArrayNamespace
) -> tuple[NoiseState, Flag]:
    """Prepares the state for a value. A restart resets the count and keeps the noise.

    Args:
        state: the state before the value.
        value: float32 0-d.
        restart: whether a change was expected at this step, bool 0-d.
        xp: the array namespace.

    Returns:
        The state, and whether the value is the first one, bool 0-d. The first value has no
        difference to an earlier one.
    """
    count = xp.where(restart, 0, state.count)
    first = count == 0
    return state._replace(count=count, last=xp.where(first, value, state.last)), first


def noise_unit(state: NoiseState, level: Float, min_share: Number, *, xp: ArrayNamespace) -> Float:
    """Returns the unit in which spikes and trends are measured: the noise, with a floor.

    Without the floor, a run that is almost without noise would raise an alarm at each small rise.

    Args:
        state: the noise.
        level: the level of the values, float32 0-d.
        min_share: smallest noise, as a share of the level.
        xp: the array namespace.

    Returns:
        float32 0-d, in the unit of the values. 0 if all values were zero.
    """
    return xp.maximum(state.noise, xp.product(min_share, xp.abs(level)))


def learn_noise(
    state: NoiseState,
    value: Float,
    allowed: Flag,
    max_jump: Float,
    window: Number,
    *,
    xp: ArrayNamespace,
) -> tuple[NoiseState, Float]:
    """Learns a value: its difference to the last value moves the noise.

    Args:
        state: the state from `begin_noise`.
        value: float32 0-d, finite where `allowed` holds.
        allowed: whether the value is learnt, bool 0-d.
        max_jump: largest difference that counts, float32 0-d. One outlier would otherwise raise
            the noise, and hide the outliers after it.
        window: number of values that determine the noise.
        xp: the array namespace.

    Returns:
        The new state, and the weight of this value, float32 0-d: 1 / count, but at least
        1 / window. The weight may be infinite where `allowed` does not hold.
    """
    value = xp.where(allowed, value, state.last)  # without a jump the noise stays
    count = xp.minimum(state.count + allowed, window)
    weight = xp.reciprocal(count)
    jump = xp.abs(value - state.last)
    step = xp.product(weight, xp.minimum(jump, max_jump) - state.noise)
    noise = state.noise + xp.where(jump > 0, step, 0.0)
    return NoiseState(count, value, numerics.flush(noise, xp=xp)), weight


# -- spikes ----------------------------------------------------------------------------------------

THRESHOLD_GAIN = 0.2  # increase of the threshold per full vote, as a share of the threshold
TARGET_VOTE = 1.0 / 256.0  # mean vote at which the threshold settles
ESCAPE_WINDOWS = 2  # windows after which the level of a sustained spike becomes the level
_INFINITE = float("inf")
MIN_THRESHOLD_SHARE = 0.5  # smallest threshold, as a share of `z_threshold`


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
    """One bad batch, or a sustained rise of the loss above the run's own noise.

    The threshold is in units of the noise, so the same numbers fit any task and unit of the loss.
    """

    z_threshold: Positive = 5.5
    """Height above the level, in units of the noise, from which a value is an outlier. A
    value at twice this height has a full vote. Frequent outliers raise the threshold."""
    evidence: Annotated[Number, number(above=0, most=15)] = 2.0
    """Sum of votes above which a spike is sustained."""
    window: Steps = NOISE_WINDOW
    """Number of values learnt before any is judged; later values have the weight 1 / window."""
    min_noise: Positive = SMALL_NOISE
    """Smallest noise, as a share of the level."""

    CAUSE = Cause.LOSS_SPIKE
    NEEDS = frozenset({"loss"})
    init = zero_init(SpikeState)

    def update(
        self, state: SpikeState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[SpikeState, Reading]:
        """Judges `seen.loss`, then learns it.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.
            xp: the array namespace.

        Returns:
            The state after the step, and the reading. An alarm is a full vote; it is sustained if
            the sum of the votes is above `evidence`. `z` is the height above the level in units of
            the noise.
        """
        return _judge(self, state, seen.loss, seen.finite, seen.restart, xp=xp)


class GradSpikeConfig(NamedTuple):
    """A global gradient norm far above its recent level.

    The norm rises before the loss does (BLOOM-176B: 0.24, 0.95, 2.4, 16, 145, 960 in the iterations
    before the loss peak). Norms of 0 are neither judged nor learnt.
    """

    z_threshold: Positive = LossSpikeConfig().z_threshold
    evidence: Annotated[Number, number(above=0, most=15)] = LossSpikeConfig().evidence
    window: Steps = LossSpikeConfig().window
    min_noise: Positive = 0.18
    """Smallest noise, as a share of the level: an alarm is three times the level or more."""

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = frozenset({"grad_norm"})
    init = zero_init(SpikeState)

    def update(
        self, state: SpikeState, seen: Observed, *, xp: ArrayNamespace
    ) -> tuple[SpikeState, Reading]:
        """Judges `seen.grad_norm`, then learns it. Skips norms of 0.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.
            xp: the array namespace.

        Returns:
            The state after the step, and the reading, as of `LossSpikeConfig.update`, but without
            the score: a `Telemetry` has the score of the loss only.
        """
        norm = seen.grad_norm
        new, reading = _judge(self, state, norm, seen.finite & (norm > 0), seen.restart, xp=xp)
        return new, reading._replace(z=None)


def _judge(
    config: LossSpikeConfig | GradSpikeConfig,
    state: SpikeState,
    value: Float,
    learn: Flag,
    restart: Flag,
    *,
    xp: ArrayNamespace,
) -> tuple[SpikeState, Reading]:
    """Judges `value` (float32, finite where `learn` holds), then learns it."""
    values, first = begin_noise(state.values, value, restart, xp=xp)
    judged = numerics.and_not(learn, values.count < config.window)
    threshold = xp.where(first, config.z_threshold, state.threshold)
    level, votes = state.level, state.votes

    unit = noise_unit(values, level, config.min_noise, xp=xp)
    known = unit > 0
    gap = value - level
    # A value that is not judged has the score 0, and therefore no vote.
    z = xp.quotient(gap, xp.where(known & judged, unit, _INFINITE))
    vote = xp.clip(xp.quotient(z - threshold, threshold), 0.0, 1.0)

    max_gap = xp.where(known, xp.product(threshold, unit), numerics.SIGNAL_LIMIT)
    new_values, weight = learn_noise(values, value, learn, max_gap, config.window, xp=xp)
    new_votes = votes - xp.product(weight, votes) + vote
    new_votes = xp.minimum(new_votes, numerics.plus_one(config.evidence))
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
        numerics.flush(xp.where(restarts, value, level), xp=xp),
        xp.where(numerics.and_not(judged, sustained), learnt, threshold),
        numerics.flush(xp.where(restarts, 0.0, votes), xp=xp),
        xp.where(restarts, 0, lasting),
    )
    return new, Reading(vote >= 1, sustained & (vote > 0), z=z)
