"""Comparisons that remember how close they were, what rests on them, and the base of detectors.

The reference computes in float64, the core in float32. Where two numbers are all but equal, either
answer is right; everywhere else the two must agree.
"""

import math
from typing import Any

from healcore.core.decision import Cause

Finding = tuple[bool, bool, int]
"""Whether there is an alarm, whether it is sustained, and its causes."""

TOLERANCE = 1e-4
"""Relative distance under which float32 may decide otherwise: a standard deviation of one percent
of the mean, from differences of rounded means, keeps three to four digits."""


class Ties:
    """Collects the closest comparison of a step."""

    def __init__(self) -> None:
        self.closest = math.inf

    def forget(self) -> None:
        """Begins a new step."""
        self.closest = math.inf

    @property
    def close(self) -> bool:
        """Whether some comparison of this step was too close to call."""
        return self.closest < TOLERANCE

    def recall(self, closest: float) -> None:
        """An earlier comparison of this closeness bears on this step too."""
        self.closest = min(self.closest, closest)

    def above(self, a: float, b: float, *also: float) -> bool:
        """`a > b`; `also` holds the magnitudes that a or b are differences of."""
        size = max(abs(a), abs(b), *(abs(each) for each in also))
        if size > 0:
            self.closest = min(self.closest, abs(a - b) / size)
        return a > b


class Watch:
    """A leaky count of rejections, and the mean and variance of the raw values since it began."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.rejections = 0
        self.level = self.spread = 0.0

    def see(self, value: float, rejected: bool) -> bool:
        """Takes a learnt value; returns whether `level` and `spread` are the new baseline."""
        most = self.config.patience * self.config.gain
        if not rejected and self.rejections == 0:
            return False
        if rejected and self.rejections == 0:
            self.level, self.spread = value, 0.0
        else:
            off = value - self.level
            self.level += off / 8
            self.spread += (off * (value - self.level) - self.spread) / 8
        if not rejected:
            self.rejections = max(0, self.rejections - self.config.forgive)
            return False
        self.rejections = min(self.rejections + self.config.gain, 2 * most)
        if self.rejections < most or self.ties.above(self.spread, self.level**2 / 4):
            return False
        self.rejections = 0
        return True


def warmup(value: float, mean: float, ties: Ties) -> tuple[float, bool]:
    """The value to learn from a norm in warm-up, and whether earlier values are forgotten."""
    if ties.above(value, 10 * mean):
        return 10 * mean, False
    return value, ties.above(mean, 10 * value)


class Detector:
    """Subclasses have `see(step) -> Finding`; `begin` forgets all values.

    `see_dropped` is called instead for a step that the caller skips.
    """

    cause = Cause(0)

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.begin()

    def begin(self) -> None:
        self.row = 0

    def see_dropped(self, step: Any) -> None:
        """Learns nothing."""

    def found(self, alarm: bool, sustained: bool | None = None) -> Finding:
        lasting = alarm if sustained is None else sustained
        return alarm, lasting, int(self.cause) if alarm or lasting else 0
