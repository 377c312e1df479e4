"""Detectors with fixed limits: NaN and Inf, vanishing gradients, and ceilings of loss and norm.

A limit is the user's choice, or follows from the first steps of the run. A limit that the user has
chosen has no escape. `grad_ceiling` learns its first norms again after `escape` alarms in a row.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.core import ranges
from healcore.core.array_namespace import Float, Int, xp
from healcore.core.decision import NONFINITE, Cause, DetectorResult
from healcore.core.signals import CheckedSignals
from healcore.core.trees import zero_init


class NonFiniteState(NamedTuple):
    """No state: each step is judged by itself."""


class NonFiniteConfig(NamedTuple):
    """Detector of NaN and Inf in loss or gradient, and of norms that overflowed float32.

    Every such step is an alarm. The rule's `when` sets how many are too many, in a row or within a
    window. The window detects a run in which every other step is NaN. The detector names no signal
    in `NEEDS`, because every step has a loss or a norm.
    """

    CAUSE = NONFINITE
    NEEDS = ()
    init = zero_init(NonFiniteState)

    def update(
        self, state: NonFiniteState, seen: CheckedSignals
    ) -> tuple[NonFiniteState, DetectorResult]:
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
        return state, DetectorResult(seen.bad, seen.bad, cause)


class VanishingState(NamedTuple):
    """Count of consecutive small norms."""

    streak: Int
    """Consecutive steps below the threshold, at most `patience`."""


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
    init = zero_init(VanishingState)

    def update(
        self, state: VanishingState, seen: CheckedSignals
    ) -> tuple[VanishingState, DetectorResult]:
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
        streak = xp.streak(state.streak, hit, learn, seen.restart, self.patience)
        alarm = seen.finite & vanished & (streak >= self.patience)
        return VanishingState(streak), DetectorResult(alarm, alarm)


class CeilingState(NamedTuple):
    """Largest of the first values, and the count of consecutive alarms.

    The state of both ceilings, of losses and of norms. The first values of a run show its scale,
    from which a ceiling may follow.
    """

    count: Int
    """Values learnt, at most `first_steps`."""
    top: Float
    """The largest learnt value."""
    streak: Int
    """Consecutive alarms, at most `sustain` (losses) or `escape` (norms)."""


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
    init = zero_init(CeilingState)

    def update(
        self, state: CeilingState, seen: CheckedSignals
    ) -> tuple[CeilingState, DetectorResult]:
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
        streak = xp.streak(state.streak, alarm, learn, seen.restart, self.sustain)
        count = xp.where(learn & early, count + 1, count)
        return CeilingState(count, top, streak), DetectorResult(
            alarm, alarm & (streak >= self.sustain)
        )


class GradCeilingConfig(NamedTuple):
    """Thresholds of the norm ceiling: an absolute limit, or a multiple of the first norms.

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
    NEEDS = ("grad_norm",)
    init = zero_init(CeilingState)

    def update(
        self, state: CeilingState, seen: CheckedSignals
    ) -> tuple[CeilingState, DetectorResult]:
        """Judges the norm, and learns the first norms. Non-finite steps change nothing.

        Args:
            state: the state before the step, 0-d.
            seen: the signals of the step. Reads `grad_norm`, `finite` and `restart`. A norm of 0 is
                neither judged nor learnt.

        Returns:
            The state after the step, and the result: an alarm at each outlier, which is sustained
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

        streak = xp.streak(state.streak, alarm, learn, seen.restart, self.escape)
        sustained = alarm & (streak >= self.sustain)
        accepted = learn & early & ~alarm
        count = xp.where(accepted, count + 1, count)
        top = xp.where(accepted & (norm > top), norm, top)
        if self.first_ratio is not None:
            escaped = alarm & (streak >= self.escape)
            count, streak = xp.where(escaped, 0, count), xp.where(escaped, 0, streak)
        return CeilingState(count, top, streak), DetectorResult(alarm, sustained)
