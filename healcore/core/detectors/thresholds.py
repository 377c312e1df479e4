"""Detectors with fixed limits: NaN and Inf, vanishing gradients, and ceilings of loss and norm.

A limit is the user's choice, or follows from the first steps of the run. It has no escape.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from healcore.core import ranges
from healcore.core.array_namespace import Float, Int, xp
from healcore.core.decision import NONFINITE, Cause, DetectorResult
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init


class NonFiniteConfig(NamedTuple):
    """Detector of NaN and Inf in loss or gradient, and of norms that overflowed float32.

    Every such step is an alarm. The rule's `when` sets how many are too many, in a row or within a
    window. The window detects a run in which every other step is NaN. The detector names no signal
    in `NEEDS`, because every step has a loss or a norm.
    """

    CAUSE = NONFINITE
    NEEDS = ()
    init = zero_init(tuple)

    def update(self, state: Any, seen: CheckedSignals) -> tuple[Any, DetectorResult]:
        """Reads the flags of `seen`.

        Args:
            state: the empty state.
            seen: the signals of the step. Reads `bad`, `bad_grad` and `bad_loss`.

        Returns:
            The same state, and the result, whose cause says whether loss, gradient or both are not
            finite. An alarm is sustained at once.
        """
        cause = xp.flag(seen.bad_grad, Cause.NONFINITE_GRAD)
        cause = cause | xp.flag(seen.bad_loss, Cause.NONFINITE_LOSS)
        return state, DetectorResult(seen.bad, cause=cause)


class StreakState(NamedTuple):
    """Count of consecutive norms beyond a limit."""

    streak: Int
    """Consecutive steps."""


class VanishingConfig(NamedTuple):
    """Thresholds of the vanishing detector: the global gradient norm stays below a limit.

    It is a sign of a dead network, a detached graph or a loss without gradient. One tiny norm is
    normal (a fully masked batch), but `patience` tiny norms in a row are not. A norm that is not
    finite has its own detector.
    """

    threshold: ranges.Norm = 1e-7
    """Norm below which a gradient counts as vanished."""
    patience: ranges.Steps = 20
    """Consecutive steps that raise the alarm."""

    CAUSE = Cause.GRAD_VANISHING
    NEEDS = ("grad_norm",)
    init = zero_init(StreakState)

    def update(
        self, state: StreakState, seen: CheckedSignals
    ) -> tuple[StreakState, DetectorResult]:
        """Counts steps below the threshold. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm from the step on at which `patience`
            norms in a row were small. An alarm is sustained at once.
        """
        vanished = seen.grad_norm < self.threshold
        learn, hit = seen.finite | seen.restart, vanished & ~seen.restart
        streak = xp.streak(state.streak, hit, learn, seen.restart)
        alarm = seen.finite & vanished & (streak >= self.patience)
        return StreakState(streak), DetectorResult(alarm)


class LossCeilingState(NamedTuple):
    """Largest of the first losses, and the count of consecutive alarms.

    The first losses of a run show its scale, from which a ceiling may follow.
    """

    count: Int
    """Losses learnt, at most `first_steps`."""
    top: Float
    """The largest learnt loss."""
    streak: Int
    """Consecutive alarms."""


class LossCeilingConfig(NamedTuple):
    """Thresholds of the loss ceiling: a fixed level, or the largest loss of the first steps.

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
    NEEDS = ("loss",)
    init = zero_init(LossCeilingState)

    def update(
        self, state: LossCeilingState, seen: CheckedSignals
    ) -> tuple[LossCeilingState, DetectorResult]:
        """Judges `seen.loss`, or learns it in the first steps. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `loss`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at each loss above a ceiling, which
            is sustained after `sustain` of them in a row.
        """
        learn, loss = seen.finite, seen.loss
        count = xp.where(seen.restart, 0, state.count)
        early = count < self.first_steps
        top = xp.where((count == 0) | (loss > state.top), loss, state.top)
        top = xp.where(learn & early, top, state.top)

        above = xp.product(self.first_ratio - 1.0, abs(state.top))
        over = (loss > state.top + above) & (count > 0)
        if self.ceiling is not None:
            over = over | (loss > self.ceiling)
        alarm = learn & ~early & over
        streak = xp.streak(state.streak, alarm, learn, seen.restart)
        count = xp.where(learn & early, count + 1, count)
        return LossCeilingState(count, top, streak), DetectorResult(
            alarm, alarm & (streak >= self.sustain)
        )


class GradCeilingConfig(NamedTuple):
    """Threshold of the norm ceiling: an absolute limit.

    The rule of Megatron-LM's `grad_norm_skip_threshold` (megatron/core/optimizer/optimizer.py), and
    of the self-healing callback for TRL.
    """

    ceiling: ranges.Positive = 100.0
    """Largest normal norm."""
    sustain: ranges.Steps = 5
    """Consecutive alarms that make the alarm sustained."""

    CAUSE = Cause.GRAD_SPIKE
    NEEDS = ("grad_norm",)
    init = zero_init(StreakState)

    def update(
        self, state: StreakState, seen: CheckedSignals
    ) -> tuple[StreakState, DetectorResult]:
        """Judges the norm. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`.

        Returns:
            The state after the step, and the result: an alarm at each norm above the ceiling, which
            is sustained after `sustain` of them in a row.
        """
        alarm = seen.finite & (seen.grad_norm > self.ceiling)
        streak = xp.streak(state.streak, alarm, seen.finite, seen.restart)
        return StreakState(streak), DetectorResult(alarm, alarm & (streak >= self.sustain))
