"""`History`: losses, gradient norms and the steps around signs of trouble, in bounded memory."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from healcore.runtime.dominance.anchor import RECENT, TrainedStep

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
UNUSUAL_NORM = 3.0
"""A gradient norm is unusual above this many times the largest healthy one."""


class Seen(NamedTuple):
    """A step, its loss and its gradient norm; NaN if unknown."""

    step: TrainedStep
    loss: float
    norm: float


@dataclass
class Window:
    """The steps around the first sign of some trouble."""

    start: int
    """Step of the sign."""
    largest_norm: float
    """The largest healthy gradient norm before, or Inf if none is known."""
    steps: list[Seen]

    def norms_above(self) -> set[int]:
        """Steps with an unusual gradient norm."""
        return {
            each.step.index for each in self.steps if each.norm > UNUSUAL_NORM * self.largest_norm
        }


@dataclass(eq=False)
class History:
    """What a run remembers of its steps for comparisons."""

    losses: deque[float] = field(default_factory=lambda: deque(maxlen=HEARTBEAT))
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=_NORMS))
    _last: deque[Seen] = field(default_factory=lambda: deque(maxlen=BEFORE))
    _windows: deque[Window] = field(default_factory=lambda: deque(maxlen=_WINDOWS))
    _last_sign: int = -AFTER - 1

    def is_high(self, loss: float) -> bool:
        """Whether a loss is above the last `HEARTBEAT` losses."""
        return len(self.losses) == HEARTBEAT and loss > max(self.losses)

    def add(self, seen: Seen, *, sign: bool, healthy: bool) -> bool:
        """Adds a step, and returns whether it is the first sign of some trouble.

        Args:
            seen: the step.
            sign: whether it shows trouble.
            healthy: whether no evidence of damage is pending.
        """
        index = seen.step.index
        self.losses.append(seen.loss if math.isfinite(seen.loss) else -math.inf)
        if math.isfinite(seen.loss):
            self._recent.append(seen.loss)
        is_first = sign and index - self._last_sign > AFTER
        if is_first:
            self._windows.append(Window(index, max(self._norms, default=math.inf), [*self._last]))
        if sign:
            self._last_sign = index
        window = self._windows[-1] if self._windows else None
        if window is not None and index < window.start + AFTER:
            window.steps.append(seen)
        elif healthy and math.isfinite(seen.norm):
            self._norms.append(seen.norm)
        self._last.append(seen)
        return is_first

    def level(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the last `RECENT` finite losses, or None before."""
        if len(self._recent) < RECENT:
            return None
        return statistics.fmean(self._recent), statistics.stdev(self._recent)

    def window(self, onset: int, found: int) -> Window | None:
        """The window whose sign is nearest to `onset`, of the signs up to step `found`."""
        windows = [each for each in self._windows if each.start <= found]
        return min(windows, key=lambda each: abs(each.start - onset), default=None)

    def forget(self) -> None:
        """Drops losses and windows, whose steps are repeated. Healthy norms stay."""
        self.losses.clear()
        self._recent.clear()
        self._last.clear()
        self._windows.clear()
        self._last_sign = -AFTER - 1
