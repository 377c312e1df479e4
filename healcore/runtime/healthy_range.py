"""`HealthyRange`: the values that a number of an optimizer had while the run was healthy."""

from __future__ import annotations

from typing import NamedTuple


class HealthyRange(NamedTuple):
    """Values of one number (weight decay, a beta, momentum) at healthy checkpoints."""

    low: float
    high: float
    last: float
    """The value at the last of these checkpoints."""

    @classmethod
    def of(cls, value: float, before: HealthyRange | None = None) -> HealthyRange:
        """The range `before`, or none, and one more value."""
        low, high, _ = before or (value, value, value)
        return cls(min(low, value), max(high, value), value)

    def contains(self, value: float) -> bool:
        """Whether a value exceeds no healthy one by more than their range, as a schedule does."""
        margin = self.high - self.low
        return self.low - margin <= value <= self.high + margin

    def held(self, value: float) -> float:
        """The value, or the last healthy one instead of an unusual value. An int stays one."""
        if self.contains(value):
            return value
        whole = isinstance(value, int) and float(self.last).is_integer()
        return int(self.last) if whole else self.last
