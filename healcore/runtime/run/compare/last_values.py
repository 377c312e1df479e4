"""`LastValues`: the last values of a series, with the largest of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable


class LastValues:
    """The last values of a series, with their largest at no cost in most steps.

    Taking the maximum of the series at each step would cost as many comparisons as it has values.
    Here all values are compared only if the dropped value was the largest.

    Attributes:
        values: the values, oldest first.
        largest: the largest of them, or -Inf without a value.
    """

    def __init__(self, length: int, values: Iterable[float] = ()) -> None:
        """Begins a series.

        Args:
            length: number of values that are kept.
            values: the first values. The oldest of too many are dropped.
        """
        self.values: deque[float] = deque(values, maxlen=length)
        self.largest = max(self.values, default=-math.inf)

    def add(self, value: float) -> None:
        """Adds a value, and drops the oldest value of a full series.

        The largest value is kept up to date. It is searched anew only when it drops out, because
        `add` is called at every step.

        Args:
            value: the value, which is not NaN: a maximum with NaN has no meaning.
        """
        dropped = -math.inf
        if self.is_full:
            dropped = self.values[0]
        self.values.append(value)
        if value >= self.largest:
            self.largest = value
        elif dropped == self.largest:
            self.largest = max(self.values)

    @property
    def is_full(self) -> bool:
        """Whether there are as many values as the series holds."""
        return len(self.values) == self.values.maxlen

    def is_exceeded_by(self, value: float) -> bool:
        """Whether the series is full, and a value is above all its values.

        A short series says too little: the first values of a run exceed each other by chance.

        Args:
            value: the value. The answer is False for NaN.
        """
        return self.is_full and value > self.largest
