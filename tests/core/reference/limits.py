"""The reference's detectors with a limit, a window or an average of the last values."""

import math
from typing import Any

from healcore.core.decision import Cause
from tests.core.reference.ties import Detector, Finding, Watch


def flushed(square: float) -> float:
    """A square so small that it is zero to the core."""
    return square if square >= 1e-30 else 0.0


class Limit(Detector):
    """Begins again at a restart. Rests where a value is not finite, and at a norm of 0."""

    signal = "loss"
    positive = False

    def see(self, step: Any) -> Finding:
        x = getattr(step, self.signal)
        if step.restart:
            self.begin()
        if not step.finite or (self.positive and x <= 0):
            return self.found(False)
        return self.judge(x)

    def judge(self, x: float) -> Finding:
        raise NotImplementedError


class LossWindow(Limit):
    """A list of the last values, outliers among them as their limit."""

    cause = Cause.LOSS_SPIKE

    def begin(self) -> None:
        self.held: list[float] = []
        self.row = 0

    def judge(self, x: float) -> Finding:
        c = self.config
        limit = self._limit()
        alarm = limit is not None and self.ties.above(x, limit, *map(abs, self.held))
        self.row = self.row + 1 if alarm else 0
        self.held = [*self.held, limit if alarm and limit is not None else x][-c.window :]
        return self.found(alarm, alarm and self.row >= c.sustain)

    def _limit(self) -> float | None:
        c = self.config
        n = len(self.held)
        if not n or n < c.warmup_steps:
            return None
        mean = sum(self.held) / n
        squares = sum(flushed((x - mean) ** 2) for x in self.held)
        var = squares / max(1, n - 1 if c.bessel else n)
        var = max(var, flushed((c.min_rel_std * mean) ** 2))
        return mean + c.sigmas * math.sqrt(var) if var else None


class GradWindow(LossWindow):
    """The same rule on the norm."""

    cause, signal = Cause.GRAD_SPIKE, "norm"


class GradEma(Limit):
    """Weights that decay with each accepted norm: written out, not as a recursion."""

    cause, signal, positive = Cause.GRAD_SPIKE, "norm", True

    def begin(self) -> None:
        self.count = 0
        self.weight = self.mean = 0.0
        self.watch = Watch(self.config.shift, self.ties)

    def judge(self, x: float) -> Finding:
        c = self.config
        if self.count < c.warmup_steps:
            self._learn(x)
            self.count += 1
            return self.found(False)
        alarm = not self.ties.above(c.ratio * self.mean, x)
        if not alarm:
            self._learn(x)
        escaped = self.watch.see(x, alarm)
        sustained = alarm and (escaped or self.watch.rejections >= c.sustain * c.shift.gain)
        if escaped:
            self.mean = self.watch.level
        return self.found(alarm, sustained)

    def _learn(self, x: float) -> None:
        if self.count == 0:
            self.weight = self.mean = 0.0
        decay = self.config.ema_decay
        before, after = decay * self.weight, decay * self.weight + 1 - decay
        self.mean = (before * self.mean + (1 - decay) * x) / after
        self.weight = after


class GradCeiling(Limit):
    """A row of norms above a number."""

    cause, signal = Cause.GRAD_SPIKE, "norm"

    def begin(self) -> None:
        self.row = 0

    def judge(self, x: float) -> Finding:
        alarm = x > self.config.ceiling
        self.row = self.row + 1 if alarm else 0
        return self.found(alarm, alarm and self.row >= self.config.sustain)


class LossRatio(Limit):
    """A list of the accepted losses; the mean of the last of them."""

    cause = Cause.LOSS_SPIKE

    def begin(self) -> None:
        self.accepted: list[float] = []
        self.row = 0
        self.last = 0.0

    def judge(self, x: float) -> Finding:
        c = self.config
        if self._judge(x):
            self.row += 1
            finding = self.found(True, self.row >= c.sustain)
            if self.row >= c.escape:
                self.accepted = [x]
                self.last = x
                self.row = 0
            return finding
        self.row, self.last = 0, x
        self.accepted = [*self.accepted, x][-c.window :]
        return self.found(False)

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


class LossCeiling(Limit):
    """The losses of the first steps."""

    cause = Cause.DIVERGENCE

    def begin(self) -> None:
        self.first: list[float] = []
        self.row = 0

    def judge(self, x: float) -> Finding:
        c = self.config
        if len(self.first) < c.first_steps:
            self.first.append(x)
            self.row = 0
            return self.found(False)
        alarm = c.ceiling is not None and x > c.ceiling
        if self.first and c.first_ratio == 1:
            alarm |= x > max(self.first)  # as they came in: no tie
        elif self.first:
            top = max(self.first)
            alarm |= self.ties.above(x, top + (c.first_ratio - 1) * abs(top), top)
        self.row = self.row + 1 if alarm else 0
        return self.found(alarm, alarm and self.row >= c.sustain)
