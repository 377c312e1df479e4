"""`RecentSteps`: what is usual in the last steps of a run, and which steps are suspect.

A comparison finds out late that the weights are damaged. The recent steps then date the start of
the trouble, and name the steps that may have caused it:

    steps    . . . . . . . . | h . . h . . h . . . . . | . . h . . . .
             STEPS_BEFORE_SIGN  first high step           later high steps (h)
                                STEPS_AFTER_SIGN
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.healthy_ranges import UNUSUAL_NORM
from healcore.runtime.run.witness.evidence import RECENT, TrainedStep

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

REGULAR_INTERVAL = 100
"""Steps between two regular comparisons, more if `loss_fn` is expensive. Also the number of last
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
MAX_NORMS = 500
"""Gradient norms of each engine, of which the largest is healthy."""
UNTIL_HEALTHY = STEPS_BEFORE_SIGN + STEPS_AFTER_SIGN
"""Steps after which a trouble of a step has shown, so that its norms and rates may be healthy."""


class Signs(NamedTuple):
    """What the loss and the gradient norms of one step say."""

    sign: bool
    """Whether the step is a sign of trouble: it has an alarm, a loss above the last losses, or an
    unusual gradient norm."""
    high: bool
    """Whether the step may belong to the trouble: a sign, or a loss above the last usual losses."""
    first_alarm: bool
    """Whether the step has the first alarm for `STEPS_AFTER_SIGN` steps."""
    last_is_over: bool
    """Whether the last sign was exactly `STEPS_AFTER_SIGN` steps ago."""


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
        """The largest finite gradient norm of each engine at these steps."""
        found: dict[str, float] = {}
        for step in self.steps:
            for name, norm in step.norms.items():
                if math.isfinite(norm):
                    found[name] = max(norm, found.get(name, 0.0))
        return found


class RecentSteps:
    """Losses, gradient norms and batches of the last steps, in bounded memory.

    The losses are in the `ComparisonState`, which a checkpoint holds. A loss is *usual* unless it
    exceeds each of the last `REGULAR_INTERVAL` usual losses. High losses do not become usual:
    trouble that lasts would hide its own start.

    Nobody knows that a step is healthy when it is taken: the bad steps before the first sign of
    trouble look like any other step. So norms and rates wait for `UNTIL_HEALTHY` steps, and then
    for the next healthy checkpoint, at which `learnt` takes them. A way back makes a new object.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.newest = -1
        self._last_sign = self._last_alarm = -STEPS_AFTER_SIGN - 1
        self._last: deque[TrainedStep] = deque(maxlen=STEPS_BEFORE_SIGN)
        self._kept: dict[int, TrainedStep] = {}
        """The steps around the first step of each burst, and high steps."""
        self._young: deque[TrainedStep] = deque()
        """The last steps, whose norms and rates wait. They have no batches here."""
        self._norms: dict[str, deque[float]] = {}
        """Engine -> norms that have waited, without norms above a limit in force."""
        self._rates: dict[str, NumberRange] = {}
        """Engine -> range of its rates that have waited, since the last `learnt`."""
        self._known = {**run.record.healthy.norms}
        """Engine -> largest norm that is healthy, or that has waited without a sign of trouble."""
        self._typical: dict[str, deque[float]] = {}
        """Engine -> its last finite norms, healthy or not."""

    def add(self, trained: TrainedStep, loss: float, *, alarm: bool) -> Signs:
        """Adds a step, and says whether it is a sign of trouble.

        Args:
            trained: the step.
            loss: its loss, or NaN.
            alarm: whether a detector has raised an alarm.
        """
        record = self.run.record
        state, index = record.comparisons, trained.index
        self.newest = index
        is_unusual = False
        for name, norm in trained.norms.items():
            is_unusual |= UNUSUAL_NORM * self._known.get(name, math.inf) < norm < math.inf
        sign = alarm or is_unusual or _exceeds(loss, state.last)
        is_bad = alarm or _exceeds(loss, state.last) or _exceeds(loss, state.usual)
        high = is_bad or is_unusual
        self._add_loss(loss, high=is_bad)
        signs = Signs(
            sign,
            high,
            first_alarm=alarm and index - self._last_alarm > STEPS_AFTER_SIGN,
            last_is_over=not sign and index - self._last_sign == STEPS_AFTER_SIGN,
        )
        if sign:
            self._last_sign = index
        if alarm:
            self._last_alarm = index
        if high and (not state.bursts or index - state.bursts[-1][1] > STEPS_AFTER_SIGN):
            state.bursts = [*state.bursts, (index, index)][-MAX_BURSTS:]
            for step in self._last:
                self._keep(step)
        elif high:
            state.bursts[-1] = (state.bursts[-1][0], index)
        if high or (state.bursts and index < state.bursts[-1][0] + STEPS_AFTER_SIGN):
            self._keep(trained)
        self._last.append(trained)
        self._add_norms(trained, learns=not (is_bad or state.has_evidence))
        return signs

    def _add_loss(self, loss: float, *, high: bool) -> None:
        """Adds a loss to the last losses, and to the usual losses if it is usual."""
        state = self.run.record.comparisons
        is_finite = math.isfinite(loss)
        state.last.append(loss if is_finite else -math.inf)
        state.high.append(high)
        del state.last[:-REGULAR_INTERVAL], state.high[:-REGULAR_INTERVAL]
        if is_finite and not high:
            state.usual.append(loss)
            del state.usual[:-REGULAR_INTERVAL]

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

    def _add_norms(self, trained: TrainedStep, *, learns: bool) -> None:
        """Adds norms and rates of a step, and those of an older step that have waited."""
        record = self.run.record
        for name, norm in trained.norms.items():
            if math.isfinite(norm):
                self._typical.setdefault(name, deque(maxlen=REGULAR_INTERVAL)).append(norm)
        if not learns:
            return
        self._young.append(trained._replace(batches=()))
        if len(self._young) <= UNTIL_HEALTHY:
            return
        old, limits = self._young.popleft(), record.envelope.norm_limits
        for name, norm in old.norms.items():
            if math.isfinite(norm) and norm <= limits.get(name, math.inf):
                self._norms.setdefault(name, deque(maxlen=MAX_NORMS)).append(norm)
                if trained.index - self._last_sign > UNTIL_HEALTHY:
                    self._known[name] = max(norm, self._known.get(name, 0.0))
        for name, rate in old.rates.items():
            if math.isfinite(rate):
                self._rates[name] = self._range_with(name, rate)

    def _range_with(self, name: str, rate: float) -> NumberRange:
        """The range of the rates of an engine that have waited, extended to a rate."""
        known = self._rates.get(name, NumberRange(rate, rate, rate))
        return NumberRange(min(known.low, rate), max(known.high, rate), rate)

    # -- what is usual or healthy ---------------------------------------------------------------

    def accept(self) -> None:
        """Makes the last losses the usual losses, if most of them are high.

        Called where a comparison of weights has shown no damage. Otherwise a change of the data
        that raises the loss would make every later step a sign of trouble. Losses that are all NaN
        or Inf are no level: every later loss would exceed it.
        """
        state = self.run.record.comparisons
        if 2 * sum(state.high) > REGULAR_INTERVAL and max(state.last) > -math.inf:
            state.usual = [*state.last]
            state.high.clear()

    def recent_losses(self) -> list[float]:
        """The last `RECENT` finite losses, or no loss before there are so many."""
        last = [loss for loss in self.run.record.comparisons.last if loss > -math.inf]
        return last[-RECENT:] if len(last) >= RECENT else []

    def mean_loss(self) -> float:
        """The mean of `recent_losses`, or NaN without losses."""
        losses = self.recent_losses()
        return sum(losses) / len(losses) if losses else math.nan

    def learnt(
        self, newest: Mapping[str, float]
    ) -> tuple[dict[str, NumberRange], dict[str, float]]:
        """What is healthy at a healthy checkpoint, of the steps that have waited.

        Rates from between two checkpoints count, because a schedule may have its peak there.

        Args:
            newest: engine name -> rate of the newest step.

        Returns:
            Engine name -> lowest, highest and newest rate since the last call, for the engines in
            `newest`; and engine name -> largest healthy gradient norm, where one is known.
        """
        rates = {name: self._range_with(name, rate) for name, rate in newest.items()}
        self._rates.clear()
        norms = {**self.run.record.healthy.norms}
        for name, seen in self._norms.items():
            known = norms.get(name, 0.0)
            norms[name] = max(seen)
            if len(seen) < MAX_NORMS:
                norms[name] = max(known, norms[name])
        self._known = {**norms}
        return rates, norms

    def typical_norms(self) -> dict[str, float]:
        """The median of the last finite gradient norms of each engine, healthy or not.

        A limit that is held follows this median upwards, see `HeldNorm.following`. Engines with too
        few norms are missing.
        """
        found: dict[str, float] = {}
        for name, norms in self._typical.items():
            if len(norms) == norms.maxlen:
                found[name] = statistics.median(norms)
        return found

    def suspect_steps(self, onset: int, found: int) -> SuspectSteps | None:
        """The steps that may have caused some trouble.

        These are the steps around the first step of the burst that is nearest to the onset, and all
        steps since the onset with a high loss or an unusual norm.

        Args:
            onset: step at which the trouble began, as far as comparisons have shown.
            found: step at which it was found.

        Returns:
            The steps, or None if no high step is known.
        """
        starts = [first for first, _ in self.run.record.comparisons.bursts if first <= found]
        if not starts:
            return None
        start = min(starts, key=lambda first: abs(first - onset))
        steps: list[TrainedStep] = []
        around: list[TrainedStep] = []
        for index in sorted(self._kept):
            is_around = start - STEPS_BEFORE_SIGN <= index < start + STEPS_AFTER_SIGN
            if is_around:
                around.append(self._kept[index])
            if is_around or index >= onset - STEPS_BEFORE_SIGN:
                steps.append(self._kept[index])
        return SuspectSteps(min(start, onset), steps, around)


def _exceeds(loss: float, last: Sequence[float]) -> bool:
    """Whether a loss is above each of `REGULAR_INTERVAL` losses. False for NaN, and for fewer.

    The first losses of a run exceed each other by chance.
    """
    return len(last) == REGULAR_INTERVAL and loss > max(last)
