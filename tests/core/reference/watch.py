"""The reference's level-shift watch, and its robust warm-up."""

from __future__ import annotations

from typing import Any

from tests.core.reference.ties import Ties


class Watch:
    """A leaky count of rejections, and the mean and variance of the raw values since it began."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.run = 0
        self.level = self.spread = 0.0

    def see(self, value: float, rejected: bool) -> bool:
        """Takes a learnt value; returns whether `level` and `spread` are the new baseline."""
        most = self.config.patience * self.config.gain
        if not rejected and self.run == 0:
            return False
        if rejected and self.run == 0:
            self.level, self.spread = value, 0.0
        else:
            off = value - self.level
            self.level += off / 8
            self.spread += (off * (value - self.level) - self.spread) / 8
        if not rejected:
            self.run = max(0, self.run - self.config.forgive)
            return False
        self.run = min(self.run + self.config.gain, 2 * most)
        if self.run < most or self.ties.above(self.spread, self.level**2 / 4):
            return False
        self.run = 0
        return True


def warmup(value: float, mean: float, ties: Ties) -> tuple[float, bool]:
    """The value to learn from a norm in warm-up, and whether earlier values are forgotten."""
    if ties.above(value, 10 * mean):
        return 10 * mean, False
    return value, ties.above(mean, 10 * value)
