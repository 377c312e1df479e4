"""Comparisons that remember how close they were.

The reference computes in float64, the core in float32. Where two numbers are all but equal, either
answer is right; everywhere else the two must agree.
"""

from __future__ import annotations

import math

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
