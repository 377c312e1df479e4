"""The reference's loss ratio and loss ceiling: lists of losses, from the docstrings."""

from __future__ import annotations

from typing import Any

from healcore.core.verdict import Cause
from tests.core.reference.ties import Ties


class LossRatio:
    """A list of the accepted losses; the mean of the last of them."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.accepted: list[float] = []
        self.row = 0
        self.last = 0.0

    def see(self, step: Any) -> tuple[bool, bool, int]:
        c, x = self.config, step.loss
        if step.restart:
            self.accepted, self.row = [], 0
        if not step.finite:
            return False, False, 0
        if self._judge(x):
            self.row += 1
            finding = True, self.row >= c.sustain, int(Cause.LOSS_SPIKE)
            if self.row >= c.escape:
                self.accepted, self.last, self.row = [x], x, 0
            return finding
        self.row, self.last = 0, x
        self.accepted = [*self.accepted, x][-c.window :]
        return False, False, 0

    def _judge(self, x: float) -> bool:
        c, held = self.config, self.accepted
        if not held or len(held) < c.warmup_steps:
            return False
        mean = sum(held) / len(held)
        zeros = sum(each == 0 for each in held)
        size = max(abs(each) for each in held)
        if min(held) >= 0 and 2 * zeros < len(held):
            return self.ties.above(x, c.ratio * mean) and x > self.last
        if size == 0 or len(held) < c.window:
            return False
        return self.ties.above(x - mean, c.ratio * size, x, size) and x > self.last


class LossCeiling:
    """The losses of the first steps."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.first: list[float] = []
        self.row = 0

    def see(self, step: Any) -> tuple[bool, bool, int]:
        c, x = self.config, step.loss
        if step.restart:
            self.first, self.row = [], 0
        if not step.finite:
            return False, False, 0
        if len(self.first) < c.first_steps:
            self.first.append(x)
            self.row = 0
            return False, False, 0
        alarm = c.ceiling is not None and x > c.ceiling
        if self.first and c.first_ratio == 1:
            alarm |= x > max(self.first)  # as they came in: no tie
        elif self.first:
            top = max(self.first)
            alarm |= self.ties.above(x, top + (c.first_ratio - 1) * abs(top), top)
        self.row = self.row + 1 if alarm else 0
        return alarm, alarm and self.row >= c.sustain, int(Cause.DIVERGENCE) if alarm else 0
