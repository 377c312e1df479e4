"""`RecentSteps`: what is usual in the last steps of a run, and which steps are suspect.

A comparison finds out late that the weights are damaged. The recent steps then date the start of
the trouble, and name the steps that may have caused it:

    steps    . . . . . . . . | h . . h . . h . . . . . | . . h . . . .
             STEPS_BEFORE_SIGN  first high step           later high steps (h)
                                STEPS_AFTER_SIGN
"""

from __future__ import annotations

import copy
import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from healcore.runtime.run.witness.evidence import RECENT, TrainedStep

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

REGULAR_INTERVAL = 100
"""Steps between two regular comparisons, more if `loss_fn` is expensive. Also the number of usual
losses that a loss has to exceed to be a sign of trouble."""
STEPS_BEFORE_SIGN = 8
"""Steps before the first sign of trouble that may have caused it."""
STEPS_AFTER_SIGN = 12
"""Steps from the first sign on that may have caused the trouble, whatever their loss. Signs with
smaller gaps belong to the same trouble."""
MAX_KEPT = 128
"""Suspect steps that are kept with their batches, which may be in the memory of the device."""
MAX_BURSTS = 4
"""Bursts of high steps that are remembered."""
UNTIL_HEALTHY = STEPS_BEFORE_SIGN + STEPS_AFTER_SIGN
"""Steps after which a trouble of a step has shown, so that its norms and rates may be healthy."""


class Signs(NamedTuple):
    """What the loss and the gradient norms of one step say."""

    sign: bool
    """Whether the step is a sign of trouble: it has an alarm, an unusual gradient norm, or the
    highest loss of a burst."""
    high: bool
    """Whether the step may belong to the trouble: it has an alarm, an unusual norm, or a loss above
    the last usual losses."""
    is_urgent: bool
    """Whether trouble begins or ends: the first alarm for `STEPS_AFTER_SIGN` steps, or the last of
    so many steps after a sign."""


class RecentSteps:
    """Losses, gradient norms and batches of the last steps, in bounded memory.

    The losses are in the `ComparisonState`, which a checkpoint holds. A loss is *usual* unless it
    exceeds each of the last `REGULAR_INTERVAL` usual losses. High losses do not become usual:
    trouble that lasts would hide its own start.

    Nobody knows that a step is healthy when it is taken: the bad steps before the first sign of
    trouble look like any other step. So norms and rates wait for `UNTIL_HEALTHY` steps. The next
    healthy checkpoint takes over what was learnt. A way back makes a new object.

    Args:
        run: the parts of the run.

    Attributes:
        newest: index of the newest step, or -1.
        healthy: what is healthy at the newest step that has waited.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.newest = -1
        self.healthy = copy.deepcopy(run.record.healthy)
        self._last_sign = self._last_alarm = -STEPS_AFTER_SIGN - 1
        self._peak = -math.inf
        """The highest loss of the current burst."""
        self._last: deque[TrainedStep] = deque(maxlen=STEPS_BEFORE_SIGN)
        self._kept: dict[int, TrainedStep] = {}
        """The steps around the first step of each burst, and high steps."""
        self._waiting: deque[TrainedStep] = deque()
        """The last steps that may be healthy, without their batches."""

    def add(self, trained: TrainedStep, loss: float, *, alarm: bool) -> Signs:
        """Adds a step, and says whether it is a sign of trouble.

        Args:
            trained: the step.
            loss: its loss, or NaN.
            alarm: whether a detector has raised an alarm.
        """
        state, index = self.run.record.comparisons, trained.index
        self.newest = index
        exceeds = len(state.usual) == REGULAR_INTERVAL and loss > max(state.usual)
        unusual = any(self.healthy.is_unusual_norm(*each) for each in trained.norms.items())
        high = alarm or exceeds or unusual
        is_new = not state.bursts or index - state.bursts[-1][1] > STEPS_AFTER_SIGN
        if is_new:
            self._peak = -math.inf
        sign = alarm or unusual or (exceeds and loss > self._peak)
        is_over = not sign and index - self._last_sign == STEPS_AFTER_SIGN
        is_first = alarm and index - self._last_alarm > STEPS_AFTER_SIGN
        if sign:
            self._last_sign = index
        if alarm:
            self._last_alarm = index
        if math.isfinite(loss):
            state.recent.append(loss)
            del state.recent[:-RECENT]
            if exceeds or alarm:
                self._peak = max(self._peak, loss)
            else:
                state.usual.append(loss)
                del state.usual[:-REGULAR_INTERVAL]
        if high and is_new:
            state.bursts = [*state.bursts, (index, index)][-MAX_BURSTS:]
            for step in self._last:
                self._keep(step)
        elif high:
            state.bursts[-1] = (state.bursts[-1][0], index)
        if high or (state.bursts and index < state.bursts[-1][0] + STEPS_AFTER_SIGN):
            self._keep(trained)
        self._last.append(trained)
        if not (exceeds or alarm or state.has_evidence):
            self._waiting.append(trained._replace(batches=()))
            if len(self._waiting) > UNTIL_HEALTHY:
                old, limits = self._waiting.popleft(), self.run.record.envelope.norms
                self.healthy.add_step(old.norms, old.rates, limits)
        return Signs(sign, high, is_first or is_over)

    def _keep(self, trained: TrainedStep) -> None:
        """Keeps a suspect step, if there is room for it.

        The first steps of a long burst stay, because the cause of the trouble is near its onset.
        Later, damaged weights have high losses on good batches, too.
        """
        if len(self._kept) >= MAX_KEPT:
            first = self.run.record.comparisons.bursts[-1][0] - STEPS_BEFORE_SIGN
            self._kept = {index: each for index, each in self._kept.items() if index >= first}
        if len(self._kept) < MAX_KEPT:
            self._kept[trained.index] = trained

    def accept(self) -> None:
        """Learns the usual losses again, if a burst has lasted for half of the last losses.

        Called where a comparison of weights has shown no damage. Otherwise a change of the data
        that raises the loss would make every later step a sign of trouble.
        """
        state = self.run.record.comparisons
        if not state.bursts:
            return
        first, last = state.bursts[-1]
        if self.newest - last <= STEPS_AFTER_SIGN and self.newest - first > REGULAR_INTERVAL // 2:
            state.usual = []

    def mean_loss(self) -> float:
        """The mean of the last `RECENT` finite losses, or NaN before there are so many."""
        losses = self.run.record.comparisons.recent
        if len(losses) == RECENT:
            return sum(losses) / RECENT
        return math.nan

    def lowest_norms(self) -> dict[str, float]:
        """The lowest norm of each engine at the last `UNTIL_HEALTHY` steps, if all are known.

        A limit of the norm follows it upwards, so that it never changes every step of a run whose
        norms grow.
        """
        found: dict[str, float] = {}
        if len(self._waiting) == UNTIL_HEALTHY:
            for name in self._waiting[0].norms:
                found[name] = min(step.norms.get(name, 0.0) for step in self._waiting)
        return found

    def suspect_steps(self, onset: int, found: int) -> list[TrainedStep]:
        """The steps that may have caused some trouble, in order; empty if no high step is known.

        These are the steps around the first step of the burst that is nearest to the onset, and all
        steps since the onset with a high loss or an unusual norm. A rollback holds the norms of
        these steps below the healthy norms, and leaves out their batches. A step that is missing
        here would do the same damage again.

        Args:
            onset: step at which the trouble began, as far as comparisons have shown.
            found: step at which it was found.
        """
        starts = [first for first, _ in self.run.record.comparisons.bursts if first <= found]
        if not starts:
            return []
        start = min(starts, key=lambda first: abs(first - onset))
        steps = []
        for index in sorted(self._kept):
            is_around = start - STEPS_BEFORE_SIGN <= index < start + STEPS_AFTER_SIGN
            if is_around or index >= onset - STEPS_BEFORE_SIGN:
                steps.append(self._kept[index])
        return steps
