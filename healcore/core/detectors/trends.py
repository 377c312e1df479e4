"""Slow faults of the loss: divergence, plateau and overfitting.

Divergence: the smoothed loss stays above its best level. No spike is needed: a noisy ramp from 2 to
22 has none. The trend must exceed its best level by `rise` times the noise, and by
`ELEVATED_SHARE` of its highest excess, for `patience` steps. The alarm lasts for at most `patience`
steps. Then the current level becomes the best level, and a further rise is a new alarm. The noise
of a positive loss is often proportional to its level, so it rises with the loss. Where noise is
small compared with the trend, the relative rise is compared with the relative noise: (trend - best)
/ best with noise / trend. A logarithm would do the same, but its last bits differ between backends.

Plateau: the mean over each `window` steps is compared with the best window so far, in units of the
loss's own step-to-step change. `chance_level` is the loss of guessing: ln 2 for a preference loss,
ln V for a vocabulary of V. A window within `chance_margin` of it is a plateau too.

Overfitting: the evaluation loss stays far above the training loss. The training loss is smoothed,
because an evaluation averages over many batches and a training step does not. One high evaluation
is noise; `patience` in a row raise the alarm, until an evaluation with a smaller gap.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from healcore.core.array_namespace import (
    SIGNAL_LIMIT,
    Flag,
    Float,
    Int,
    Number,
    complement,
    xp,
)
from healcore.core.decision import Cause, DetectorResult
from healcore.core.detectors.spikes import (
    NOISE_WINDOW,
    SMALL_NOISE,
    NoiseState,
    begin_noise,
    learn_noise,
    noise_unit,
)
from healcore.core.ranges import Fraction, Level, NotNegative, Positive, Steps, whole
from healcore.core.signals import CheckedSignals
from healcore.core.trees import select, zero_init

ELEVATED_SHARE = 0.5
"""Share of the highest excess from which the trend counts as elevated."""
POSITIVE_RATIO = 2.0
"""Multiple of the noise above which a trend has few losses below zero."""


class DivergenceState(NamedTuple):
    """The trend, its lowest and highest levels, and the count of elevated steps.

    A step is elevated while the trend is far above its lowest level. Single steps in between that
    recover reduce the count, and do not reset it.
    """

    values: NoiseState
    """The noise of the losses."""
    trend: Float
    """Smoothed loss."""
    best: Float
    """Lowest trend."""
    peak: Float
    """Highest trend since the trend left the best level."""
    elevated_steps: Int
    """Elevated steps minus recovering steps."""


class DivergenceConfig(NamedTuple):
    """Thresholds of the divergence detector: the loss rises slowly, without a spike.

    Such a run looks healthy at each step, and is lost after a few hundred. A detector of spikes
    would learn the rise as the new level.
    """

    rise: Positive = 6.0
    """Height of the trend above the best level, in units of the noise at the best level. It also
    limits the distance of one step from the trend."""
    patience: Steps = 72
    """Elevated steps minus recovering steps that raise the alarm."""
    window: Steps = NOISE_WINDOW
    """Steps learnt before a rise counts; the weight of a step in the trend is 1 / window."""

    CAUSE = Cause.DIVERGENCE
    NEEDS = ("loss",)
    init = zero_init(DivergenceState)

    def update(
        self, state: DivergenceState, seen: CheckedSignals
    ) -> tuple[DivergenceState, DetectorResult]:
        """Learns `seen.loss`, then compares the trend with the best level.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm while the trend has been elevated
            for `patience` steps, at most for as many steps. An alarm is sustained at once.
        """
        learn, loss = seen.finite, seen.loss
        values, first = begin_noise(state.values, loss, seen.restart)
        warm = values.count < self.window
        trend = xp.where(first, loss, state.trend)
        unit = noise_unit(values, trend, SMALL_NOISE)
        threshold = xp.product(self.rise, unit)
        max_distance = xp.where(unit > 0, threshold, SIGNAL_LIMIT)
        learnt, weight = learn_noise(values, loss, learn, max_distance, self.window)

        distance = xp.maximum(xp.minimum(loss - trend, max_distance), -max_distance)
        trend = trend + xp.product(weight, distance)
        best = xp.where(warm, trend, xp.minimum(trend, state.best))
        excess = trend - best
        positive = (best > 0) & (trend > POSITIVE_RATIO * unit)
        at_best = xp.quotient(xp.product(threshold, best), trend)
        high = excess > xp.where(positive, at_best, threshold)
        peak = xp.where(high, xp.maximum(trend, state.peak), trend)
        elevated = high & (excess > ELEVATED_SHARE * (peak - best))
        more = state.elevated_steps + 1
        fewer = xp.decremented(state.elevated_steps)
        elevated_steps = xp.where(elevated, more, fewer)
        elevated_steps = xp.where(high, elevated_steps, 0)
        alarm = learn & elevated & (elevated_steps >= self.patience)
        expired = elevated_steps >= self.patience + self.patience
        after = DivergenceState(
            learnt,
            xp.flush(trend),
            xp.flush(xp.where(expired, trend, best)),
            xp.flush(peak),
            xp.where(expired, 0, elevated_steps),
        )
        before = state._replace(values=learnt)
        return select(learn, after, before), DetectorResult(alarm)


class PlateauState(NamedTuple):
    """The current window, the best window, and the change per step.

    A window is `window` steps. Only the mean of a window is kept, and windows do not overlap. So
    the state has the same few numbers for any length.
    """

    count: Int
    """Steps in the current window."""
    mean: Float
    """Mean of the current window so far."""
    best: Float
    """Lowest window mean."""
    windows: Int
    """Finished windows, at most 1."""
    stale: Int
    """Consecutive windows without improvement."""
    last: Float
    """Previous loss."""
    change: Float
    """Moving average of the absolute step-to-step change of the loss."""
    chance: Flag
    """The last finished window was at chance level."""


class PlateauConfig(NamedTuple):
    """Thresholds of the plateau detector: the loss stops improving, or stays at a guess.

    The model then learns nothing more, and the rest of the run is wasted.
    """

    window: Annotated[Number, whole(2)] = 500
    """Steps per window."""
    patience: Steps = 3
    """Consecutive windows without improvement that raise the alarm."""
    min_improvement: NotNegative = 0.1
    """Smallest gain of a better window, in mean absolute step-to-step changes."""
    chance_level: Level = None
    """Loss of guessing, for example 0.6931 (ln 2), or None for no such comparison."""
    chance_margin: Positive = 0.01
    """Largest distance from `chance_level` that counts as guessing."""

    CAUSE = Cause.PLATEAU
    NEEDS = ("loss",)
    init = zero_init(PlateauState)

    def update(
        self, state: PlateauState, seen: CheckedSignals
    ) -> tuple[PlateauState, DetectorResult]:
        """Adds `seen.loss` to its window.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.

        Returns:
            The state after the step, and the result. The alarm lasts until a window is better. An
            alarm is sustained at once.
        """
        learn, loss, restart = seen.finite, seen.loss, seen.restart
        started = (state.windows > 0) | (state.count > 0)
        count = xp.where(learn, state.count + 1, state.count)
        divisor = xp.as_float(xp.where(count > 0, count, 1))
        step = xp.quotient(loss - state.mean, divisor)
        mean = state.mean + xp.where(learn, step, 0.0)
        moved = xp.where(started, abs(loss - state.last), 0.0)
        change = xp.ema(state.change, moved, 0.01, learn & started)
        # The average starts at the first change. A slow start from zero would make noise look like
        # an improvement.
        change = xp.where(learn & started & (state.change == 0), moved, change)

        done = learn & (count >= self.window)
        first = done & (state.windows == 0)
        needed = xp.where(done, self.min_improvement * change, 0.0)
        better = first | (done & (state.best - mean > needed))
        stale = xp.streak(state.stale, ~better, done, better & False)
        guessing = state.chance
        if self.chance_level is not None:
            near = abs(mean - self.chance_level) <= self.chance_margin
            guessing = xp.where(done, near, guessing)

        alarm = learn & ~restart & ((stale >= self.patience) | guessing)
        new = PlateauState(
            count=xp.where(restart | done, 0, count),
            mean=xp.flush(xp.where(restart | done, 0.0, mean)),
            best=xp.where(better, mean, state.best),
            windows=xp.where(restart, 0, xp.where(done, 1, state.windows)),
            stale=xp.where(restart, 0, stale),
            last=xp.where(learn, loss, state.last),
            change=change,
            chance=guessing & ~restart,
        )
        return new, DetectorResult(alarm)


class OverfitState(NamedTuple):
    """Smoothed training loss, and the count of consecutive high evaluations.

    If the caller skips the training step, `streak` still counts the evaluation of this step.
    """

    train: Float
    """Smoothed training loss."""
    started: Flag
    """`train` has learnt a loss."""
    streak: Int
    """Consecutive evaluations with too wide a gap."""


class OverfitConfig(NamedTuple):
    """Thresholds of the overfitting detector: the evaluation loss is far above the training loss.

    It needs `eval_loss`, which the program passes at steps with an evaluation. Steps without an
    evaluation only update the smoothed training loss.
    """

    max_gap: Positive = 2.0
    """Largest normal difference of evaluation loss and smoothed training loss."""
    patience: Steps = 2
    """Consecutive high evaluations that raise the alarm."""
    ema_decay: Fraction = 0.98
    """Decay of the smoothed training loss per step."""

    CAUSE = Cause.OVERFIT
    NEEDS = ("loss", "eval_loss")
    init = zero_init(OverfitState)

    def update(
        self, state: OverfitState, seen: CheckedSignals
    ) -> tuple[OverfitState, DetectorResult]:
        """Learns `seen.loss`, and judges `seen.eval_loss` at steps with an evaluation.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `eval_loss`, `has_eval`, `finite` and
                `restart`.

        Returns:
            The state after the step, and the result. The alarm lasts until an evaluation with a
            smaller gap. An alarm is sustained at once.
        """
        learn = seen.finite
        rate = complement(self.ema_decay, seen.loss)
        train = xp.ema(state.train, seen.loss, rate, learn)
        train = xp.where(learn & ~state.started, seen.loss, train)
        started = state.started | learn
        too_wide = seen.eval_loss - train > self.max_gap
        judged, hit = (seen.has_eval & started) | seen.restart, too_wide & ~seen.restart
        streak = xp.streak(state.streak, hit, judged, seen.restart)
        alarm = streak >= self.patience
        return OverfitState(train, started, streak), DetectorResult(alarm)
