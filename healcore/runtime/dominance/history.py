"""Reasons to compare weights (`StepHistory`), and what comparisons may cost (`Credit`)."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import NamedTuple

from healcore.runtime.dominance.anchor import RECENT, TrainedStep
from healcore.runtime.store.ranks import Ranks

HEARTBEAT = 100
"""Steps between two regular comparisons, more if a comparison is slow; and the last losses that a
loss has to exceed to be a sign of trouble."""
BEFORE = 4
"""Steps of a window before the first sign of trouble."""
AFTER = 12
"""Steps of a window from the first sign on."""
_WINDOWS = 4
_NORMS = 500
"""Healthy gradient norms whose maximum is known."""

MAX_SHARE = 0.01
"""Max share of a healthy run's time that comparisons may cost."""
STEP_COST = 3.0
"""Cost of a training step in evaluations: a forward pass, and a backward pass of twice its cost."""
MAX_CREDIT = 30.0
"""Max credit of evaluations: the cost of 1,000 steps. A run starts with this credit, because a
learning rate that is too high shows in the first steps."""
MAX_DEBT = 40.0
"""Max debt of evaluations after a suspicion: ten comparisons, half of what a verdict needs."""
PRICED = 3
"""Last comparisons, of which the cheapest sets the price: the first ones compile."""


class TroubleWindow(NamedTuple):
    """The steps around the first sign of some trouble."""

    start: int
    """Step of the sign."""
    largest_norm: float
    """The largest healthy gradient norm before, or Inf if none is known."""
    steps: list[TrainedStep]


class StepHistory:
    """What a run remembers of its steps for comparisons, in bounded memory."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_NORMS)
        self.forget()

    def forget(self) -> None:
        """Drops losses and windows, whose steps are repeated. Healthy norms stay."""
        self._losses: deque[float] = deque(maxlen=HEARTBEAT)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._last: deque[TrainedStep] = deque(maxlen=BEFORE)
        self._windows: deque[TroubleWindow] = deque(maxlen=_WINDOWS)
        self._last_sign = -AFTER - 1

    def is_high(self, loss: float) -> bool:
        """Whether a loss is above the last `HEARTBEAT` losses."""
        return len(self._losses) == HEARTBEAT and loss > max(self._losses)

    def add(self, step: TrainedStep, loss: float, *, sign: bool, healthy: bool) -> bool:
        """Adds a step, and returns whether it is the first sign of some trouble.

        Args:
            step: the step.
            loss: its loss, or NaN.
            sign: whether it shows trouble.
            healthy: whether no evidence of damage is pending.
        """
        self._losses.append(loss if math.isfinite(loss) else -math.inf)
        if math.isfinite(loss):
            self._recent.append(loss)
        is_first = sign and step.index - self._last_sign > AFTER
        if is_first:
            largest = max(self._norms, default=math.inf)
            self._windows.append(TroubleWindow(step.index, largest, [*self._last]))
        if sign:
            self._last_sign = step.index
        if self._windows and step.index < self._windows[-1].start + AFTER:
            self._windows[-1].steps.append(step)
        elif healthy and math.isfinite(step.norm):
            self._norms.append(step.norm)
        self._last.append(step)
        return is_first

    def level(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the last `RECENT` finite losses, or None before."""
        if len(self._recent) < RECENT:
            return None
        return statistics.fmean(self._recent), statistics.stdev(self._recent)

    def window(self, onset: int, found: int) -> TroubleWindow | None:
        """The window whose sign is nearest to `onset`, of the signs up to step `found`."""
        windows = [each for each in self._windows if each.start <= found]
        return min(windows, key=lambda each: abs(each.start - onset), default=None)


class Credit:
    """Credit of evaluations, and the price of an evaluation in time.

    The price only lengthens the regular distance: comparisons at alarms do not depend on the clock,
    so that a repeated run makes the same comparisons.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.credit = MAX_CREDIT
        self._ranks = ranks
        self._prices: deque[int] = deque([1] * PRICED, maxlen=PRICED)
        self._step_s = 0.0
        """Seconds of a step without comparison, a moving average over a heartbeat."""
        self._last_time: float | None = None

    def after_step(self) -> None:
        """Adds the credit of a step, and measures its time."""
        self.credit = min(MAX_CREDIT, self.credit + MAX_SHARE * STEP_COST)
        now = time.monotonic()
        if self._last_time is not None:
            taken = now - self._last_time
            self._step_s += (taken - self._step_s) * (1 / HEARTBEAT if self._step_s else 1.0)
        self._last_time = now

    @property
    def distance(self) -> int:
        """Steps between two regular comparisons."""
        return HEARTBEAT * min(self._prices)

    def charge(self, evaluations: int) -> None:
        """Subtracts the evaluations since `after_step` from the credit, and measures their price.

        Their time is no part of the next step's time.
        """
        self.credit = max(-MAX_DEBT, self.credit - evaluations)
        began, self._last_time = self._last_time, None
        if not evaluations or began is None:
            return
        seconds = time.monotonic() - began
        share = STEP_COST * seconds / evaluations / self._step_s if self._step_s else 1.0
        price = 1 << max(0, round(math.log2(max(share, 1.0))))
        self._prices.append(max(self._ranks.gather(price)))  # times differ between ranks
