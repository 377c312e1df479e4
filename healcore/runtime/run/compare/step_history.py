"""`StepHistory`: what a run remembers of its last steps, to date trouble and to find its cause."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from healcore.runtime.run.compare.credit import REGULAR_INTERVAL
from healcore.runtime.run.compare.evidence import SAMPLE_SIZE
from healcore.runtime.run.compare.trained_step import TrainedStep
from healcore.runtime.run.compare.usual_values import LossLevel, NormHistory

STEPS_BEFORE_SIGN = 8
"""Steps before the first sign of trouble that may have caused it."""
STEPS_AFTER_SIGN = 12
"""Steps from the first sign on that may have caused the trouble, whatever their loss. Signs with
smaller gaps belong to the same trouble."""
MAX_HIGH_STEPS = 32 * SAMPLE_SIZE
"""Later steps with a high loss or an unusual norm that are remembered. A rollback is decided about
this many steps after the onset, so a bad shard is remembered to its end."""
MAX_ALWAYS = 8 * SAMPLE_SIZE
"""High steps that are remembered whatever their batches need. Further ones share `MAX_BYTES`."""
MAX_BYTES = 256 << 20
"""Bytes of the batches of the further steps. They may be in the memory of the device, and healcore
must not be the reason why memory runs out."""
_UNTIL_HEALTHY = STEPS_BEFORE_SIGN + STEPS_AFTER_SIGN
"""Steps without an alarm or a high loss after which the norm of a step counts as healthy."""
WINDOWS = 4
"""Signs of trouble, and bursts of high steps, that are remembered to date its onset."""


class Signs(NamedTuple):
    """What the loss and the gradient norms of one step say.

    `Comparisons.observe` decides with it whether to compare weights after the step, which is too
    expensive for every step.
    """

    sign: bool
    """Whether the step is a sign of trouble: it has an alarm, a loss above the last losses, or an
    unusual gradient norm."""
    first_alarm: bool
    """Whether the step has the first alarm for `STEPS_AFTER_SIGN` steps."""
    last_is_over: bool
    """Whether the last sign was exactly `STEPS_AFTER_SIGN` steps ago, so that its burst is over."""
    high: bool
    """Whether the step may belong to the trouble: a sign, or a loss above the last usual losses."""


class SuspectSteps(NamedTuple):
    """The steps that may have caused some trouble.

    A rollback holds the norms of these steps below the healthy norms, and leaves out their
    batches. A step that is missing here would do the same damage again.
    """

    start: int
    """Step of the first sign."""
    steps: list[TrainedStep]
    """The steps around the first sign, and the later high steps, in order."""
    around: list[TrainedStep]
    """The steps around the first sign alone."""

    def largest_norms(self) -> dict[str, float]:
        """The largest gradient norm of each engine at these steps.

        Returns:
            Engine name -> the largest finite norm. Engines without a finite norm are missing.
        """
        found: dict[str, float] = {}
        for step in self.steps:
            for name, norm in step.norms.items():
                if math.isfinite(norm):
                    found[name] = max(norm, found.get(name, 0.0))
        return found


class _Window(NamedTuple):
    """The steps around the first sign of some trouble."""

    start: int
    """Index of the first step of the window."""
    steps: list[TrainedStep]
    """The steps with their batches, oldest first."""


class StepHistory:
    """Losses, gradient norms and batches of the last steps, in bounded memory.

    A comparison of weights finds out late that they are damaged. The history then dates the start
    of the trouble, and names the steps that may have caused it:

        steps    . . . . . . . . | s . . h . h . . . . . . | . . h . . . .
                 STEPS_BEFORE_SIGN  first sign (s)            later high steps (h)
                                    STEPS_AFTER_SIGN

    Which losses are usual is explained by `LossLevel`, and which gradient norms and learning rates
    are healthy by `NormHistory`.

    Attributes:
        level: the usual losses.
    """

    def __init__(self) -> None:
        self.norms = NormHistory(_UNTIL_HEALTHY)
        self.forget()

    def forget(
        self, norms: Mapping[str, float] | None = None, usual_loss: float | None = None
    ) -> None:
        """Drops the steps, which are repeated after a rollback.

        Args:
            norms: engine name -> largest healthy gradient norm at the step from which on the run
                repeats its steps, or None to keep the known norms.
            usual_loss: largest usual loss at this step, or None if unknown. Without it no loss of
                the next `REGULAR_INTERVAL` steps would be high, and the bad batches of a repeat
                would not be found.
        """
        self.norms.forget(norms or {})
        self.level = LossLevel()
        if usual_loss is not None:
            self.level = LossLevel([usual_loss] * REGULAR_INTERVAL)
        self._last: deque[TrainedStep] = deque(maxlen=STEPS_BEFORE_SIGN)
        """The last steps, with their batches."""
        self._windows: deque[_Window] = deque(maxlen=WINDOWS)
        """The steps around the first sign of each trouble."""
        self._high: deque[TrainedStep] = deque()
        """At most `MAX_HIGH_STEPS` steps with a sign or a high loss, see `_add_high`."""
        self._high_sizes: deque[float] = deque()
        """Bytes of the batches of each of these steps."""
        # As if each had ended so long before step 0 that step 0 continues none of them.
        long_ago = -STEPS_AFTER_SIGN - 1
        self._burst = (long_ago, long_ago)
        """First and last step of the newest burst of high steps."""
        self._last_sign = long_ago
        self._last_alarm = long_ago

    def add(
        self,
        trained: TrainedStep,
        loss: float,
        *,
        alarm: bool,
        healthy: bool,
        norm_limits: Mapping[str, float],
    ) -> Signs:
        """Adds a step, and says whether it is a sign of trouble.

        Args:
            trained: the step.
            loss: its loss, or NaN.
            alarm: whether a detector has raised an alarm.
            healthy: whether no evidence of damage is pending.
            norm_limits: engine name -> limit of its gradient norm, where there is one. Norms above
                a limit are not learnt.

        Returns:
            What the loss and the norms of the step say.
        """
        is_record = self.level.last.is_exceeded_by(loss)
        is_bad = alarm or is_record or self.level.usual.is_exceeded_by(loss)
        sign = alarm or is_record or self.norms.is_unusual(trained)
        high = is_bad or sign
        since_sign = trained.index - self._last_sign
        first_alarm = alarm and trained.index - self._last_alarm > STEPS_AFTER_SIGN
        if alarm:
            self._last_alarm = trained.index
        self.level.add(loss, high=is_bad)
        if sign:
            if since_sign > STEPS_AFTER_SIGN:  # the first sign of a trouble
                self._windows.append(_Window(trained.index, [*self._last]))
            self._last_sign = trained.index
        if self._windows and trained.index < self._windows[-1].start + STEPS_AFTER_SIGN:
            self._windows[-1].steps.append(trained)
        if high:
            self._add_high(trained)
        self.norms.add(trained, norm_limits, is_bad=is_bad, healthy=healthy)
        self._last.append(trained)
        return Signs(sign, first_alarm, not sign and since_sign == STEPS_AFTER_SIGN, high)

    def _add_high(self, trained: TrainedStep) -> None:
        """Adds a step with a sign or a high loss, if there is room for it.

        The first steps of a long burst stay, because the cause of the trouble is near its onset.
        Later, damaged weights have high losses on good batches, too.
        """
        first, last = self._burst
        if trained.index - last > STEPS_AFTER_SIGN:
            first = trained.index
        self._burst = (first, trained.index)
        size = trained.nbytes
        while not self._has_room(size):
            if self._high[0].index >= first:
                return
            self._high.popleft()  # the oldest step is of an earlier burst
            self._high_sizes.popleft()
        self._high.append(trained)
        self._high_sizes.append(size)

    def _has_room(self, size: float) -> bool:
        """Whether one more high step may be remembered.

        Args:
            size: bytes of its batches.
        """
        if len(self._high) < MAX_ALWAYS:
            return True
        if len(self._high) == MAX_HIGH_STEPS:
            return False
        return sum(itertools.islice(self._high_sizes, MAX_ALWAYS, None)) + size <= MAX_BYTES

    @property
    def newest(self) -> int:
        """Index of the newest step, or -1 before the first."""
        if not self._last:
            return -1
        return self._last[-1].index

    def suspect_steps(self, onset: int, found: int) -> SuspectSteps | None:
        """The steps that may have caused some trouble.

        These are the steps around the sign that is nearest to the onset, of the signs up to step
        `found`, and all steps since the onset with a high loss or an unusual norm.

        Args:
            onset: step at which the trouble began, as far as comparisons have shown.
            found: step at which it was found.

        Returns:
            The steps, or None if no sign is known.
        """
        windows = [each for each in self._windows if each.start <= found]
        if not windows:
            return None
        window = min(windows, key=lambda each: abs(each.start - onset))
        steps = {step.index: step for step in window.steps}
        for step in self._high:
            if step.index >= onset - STEPS_BEFORE_SIGN:
                steps[step.index] = step
        ordered = [steps[index] for index in sorted(steps)]
        return SuspectSteps(min(window.start, onset), ordered, window.steps)
