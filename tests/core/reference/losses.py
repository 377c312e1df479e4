"""The reference's spikes and divergence, in Python floats."""

import math
from typing import Any

from healcore.core.decision import Cause
from tests.core.reference.ties import Detector, Finding, Ties


def clamp(x: float, low: float, high: float) -> float:
    """`x` within [low, high]."""
    return max(low, min(high, x))


class Noise:
    """The mean absolute difference of successive values, each of which counts up to a limit."""

    def __init__(self, window: int) -> None:
        self.window, self.count = window, 0
        self.last = self.noise = 0.0

    def unit(self, level: float, least: float) -> float:
        return max(self.noise, least * abs(level))

    def learn(self, x: float, most: float) -> float:
        """One value; returns its weight."""
        self.count = min(self.count + 1, self.window)
        if x != self.last:
            self.noise += (min(abs(x - self.last), most) - self.noise) / self.count
        self.last = x
        return 1 / self.count


class Outliers:
    """Counts votes of single values against a learnt threshold, and ends each incident."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.noise = Noise(config.window)
        self.level = self.threshold = self.votes = 0.0
        self.lasted = 0

    def see(self, x: float, learn: bool, restart: bool) -> tuple[bool, bool]:
        c, noise = self.config, self.noise
        if restart:
            # The noise is remembered: what is expected is another level, not another noise.
            noise.count = 0
        if noise.count == 0:
            self.level = noise.last = x
            self.threshold, self.votes, self.lasted = c.z_threshold, 0.0, 0
            self.doubt = math.inf  # a sum of votes too close to call: all later ones rest on it
        if not learn:
            return False, False
        warm = noise.count < c.window
        unit = noise.unit(self.level, c.min_noise)
        off = x - self.level
        score = 0.0 if warm or unit == 0 else off / unit / self.threshold
        vote = clamp(score - 1, 0, 1)
        if unit > 0 and not warm:
            sizes = (x / unit, self.level / unit)
            alarm = not self.ties.above(2 * self.threshold, score * self.threshold, *sizes)
            voting = self.ties.above(score * self.threshold, self.threshold, *sizes)
        else:
            alarm = voting = False
        before = noise.last
        limit = self.threshold * unit if unit > 0 else math.inf
        weight = noise.learn(x, limit)
        self.votes = min(self.votes * (1 - weight) + vote, c.evidence + 1)
        here = Ties()
        enough = here.above(self.votes, c.evidence)
        self.doubt = here.closest if here.close else self.doubt
        self.ties.recall(min(here.closest, self.doubt))
        if off > 0:
            self.level += weight * min(off, limit)
        else:
            self.level = min(self.level, max(x, before))
        if not warm and not enough:
            learnt = self.threshold * (1 + 0.2 * (vote - 1 / 256))
            self.threshold = max(learnt, c.z_threshold / 2)
        self.lasted = self.lasted + 1 if enough else 0
        if self.lasted >= 2 * c.window:
            self.level, self.votes, self.lasted = x, 0.0, 0
        return alarm, enough and voting


class LossSpike(Detector):
    """Outliers of the loss."""

    cause = Cause.LOSS_SPIKE

    def begin(self) -> None:
        self.outliers = Outliers(self.config, self.ties)

    def see(self, step: Any) -> Finding:
        return self.found(*self.outliers.see(step.loss, step.finite, step.restart))


class NormSpike(LossSpike):
    """Outliers of the gradient norm, by the same rule."""

    cause = Cause.GRAD_SPIKE

    def see(self, step: Any) -> Finding:
        x = step.norm
        return self.found(*self.outliers.see(x, step.finite and x > 0, step.restart))


class Divergence(Detector):
    """A trend that rises above its best level and does not come back."""

    cause = Cause.DIVERGENCE

    def begin(self) -> None:
        self.noise = Noise(self.config.window)
        self.trend = self.best = self.peak = 0.0
        self.elevated_steps = 0
        self.doubt = math.inf
        """The last comparison too close to call since the trend was last clearly not high."""

    def see(self, step: Any) -> Finding:
        noise = self.noise
        if step.restart:
            noise.count = 0
        if not step.finite:
            return self.found(False)
        c, x = self.config, step.loss
        if noise.count == 0:
            self.trend = noise.last = x
        warm = noise.count < c.window
        bar = c.rise * noise.unit(self.trend, 0.001)
        limit = bar or math.inf
        self.trend += noise.learn(x, limit) * clamp(x - self.trend, -limit, limit)
        self.best = self.trend if warm else min(self.best, self.trend)
        excess = self.trend - self.best
        size = abs(self.trend)
        here = Ties()
        if self.best > 0 and here.above(self.trend, 2 * bar / c.rise, size):
            bar *= self.best / self.trend
        high = here.above(excess, bar, size)
        self.peak = max(self.peak, self.trend) if high else self.trend
        elevated = high and here.above(excess, (self.peak - self.best) / 2, size)
        self.ties.recall(self.doubt)
        self.ties.recall(here.closest)
        if here.close:
            self.doubt = here.closest
        elif not high:
            self.doubt = math.inf
        if not elevated:
            self.elevated_steps = max(self.elevated_steps - 1, 0) if high else 0
            return self.found(False)
        self.elevated_steps += 1
        alarm = self.elevated_steps >= c.patience
        if self.elevated_steps >= 2 * c.patience:
            self.best, self.elevated_steps = self.trend, 0
        return self.found(alarm)
