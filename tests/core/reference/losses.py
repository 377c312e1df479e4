"""The reference's loss detectors: what a loss spike and a divergence are, in Python floats."""

from __future__ import annotations

from typing import Any

from healcore.core.verdict import Cause
from tests.core.reference.ties import Ties

Finding = tuple[bool, bool, int]


def clamp(x: float, low: float, high: float) -> float:
    """`x` within [low, high]."""
    return max(low, min(high, x))


class Level:
    """The level of a loss, fast in falling and slow in rising, and its noise."""

    def __init__(self, ties: Ties) -> None:
        self.ties = ties
        self.count = 0
        self.mean = self.slow = self.now = self.last = 0.0
        self.noise = self.long = self.wander = self.residual = self.grid = 0.0

    def unit(self) -> tuple[float, bool]:
        """The noise to measure by, and whether that is only a share of the level."""
        size = abs(self.mean)
        noise = max(self.noise, 0.95 * self.long)
        constant = not self.ties.above(noise, size / 2**18)
        if constant:
            noise = size / 2**10
        return max(noise, 0.5 * min(self.grid, size / 2**5)), constant

    def elevation(self, unit: float) -> float:
        """The level above the slow level, in units of its own wander."""
        wander = max(self.wander, 0.3 * unit)
        return (self.mean - self.slow) / (wander if unit > 0 else 1.0)

    def learn(
        self, x: float, unit: float, constant: bool, *, warm: bool, lasting: bool, over: bool
    ) -> None:
        """One loss; `lasting`: within a spike, `over`: which ends here."""
        share = 1 / (self.count + 1)
        off = x - self.mean
        up = self.ties.above(off, 0.0, x, self.mean)
        was_up = self.ties.above(self.residual, 0.0, self.last, self.mean)
        capped = abs(off)
        if not warm and unit > 0:
            capped = min(capped, 3.5 * unit)
        if up:
            move, pace = capped, 0.0 if lasting else 0.05
        else:
            move, pace = (-capped if was_up else off), 0.33
        mean = self.mean + (max(pace, share) if warm else pace) * move

        first_noise = constant and not warm
        if not (lasting and up):
            pace = max(share, 0.04) if warm else 0.04
            if not warm and up == was_up and self.ties.above(capped, self.noise, x):
                pace *= 0.25
            old = self.noise
            self.noise += (1.0 if first_noise else pace) * (capped - old)
            pace = clamp(2.5 * share, 1 / 512, 1.0)
            self.long += (1.0 if first_noise else pace) * (capped - self.long)

        gap = mean - self.slow
        if not lasting:
            # Going up far is a climb, and still going down is a fall; neither is wandering.
            furthest = (2.0 if gap > 0 else 3.5) * max(self.wander, 0.3 * unit)
            far = abs(gap) / 2 if gap < 0 and not up else abs(gap)
            if not warm and unit > 0:
                far = min(far, furthest)
            self.wander += clamp(2.5 * share, 1 / 512, 1.0) * (far - self.wander)
        if warm:
            self.slow = mean
        elif not lasting:
            self.slow += (0.1 if gap < 0 else 0.01) * gap
        self.mean = mean
        self.now += max(share, 0.1) * (x - self.now)
        jump = abs(x - self.last)
        if jump and not (self.grid and jump >= self.grid):
            self.grid = jump
        self.residual, self.last = off, x
        self.count += 1
        if over:
            self.mean = self.slow = self.now


class LossSpike:
    """Counts votes of single steps against a learnt threshold, and ends each incident."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.level = Level(ties)
        self.tail, self.votes, self.lasted = 1.5, 0.0, 0
        self.excess = 0.0
        """The last loss less its level."""

    def see(self, step: Any) -> Finding:
        c, level, x = self.config, self.level, step.loss
        if step.restart:
            # The noise is remembered: what is expected is another level, not another noise.
            level.count = 0
        if level.count == 0:
            level.mean = level.slow = level.now = level.last = x
            self.tail, self.votes, self.lasted = 1.5, 0.0, 0
        if not step.finite:
            return False, False, 0
        warm = level.count < c.warmup_steps
        unit, constant = level.unit()
        self.excess = x - level.mean
        z = 0.0 if warm or unit == 0 else self.excess / unit
        score = z / (c.z_threshold * self.tail)
        vote = clamp(2 * (score - 1), 0, 1)
        against = 3 * clamp(2 * (-0.3 - score), 0, 1)
        alarm = not warm and not self.ties.above(1.5, score)
        slow_vote = 0.0
        if not warm and unit > 0 and self.lasted == 0 and level.count > 3 * c.warmup_steps:
            height = level.elevation(unit) / 5
            if self.ties.above(height, 1.0):
                slow_vote = 0.4 * clamp(height - 1, 0, 1)
        votes = 0.95 * self.votes + max(vote, slow_vote) - against
        self.votes = clamp(votes, 0, c.evidence + 0.5)
        enough = self.ties.above(self.votes, c.evidence)
        fading = self.lasted > 0 and not self.ties.above(0.5, self.votes)
        lasting = enough or fading
        # Within an incident only a step that casts a vote counts.
        voting = self.ties.above(score, 1.0) or slow_vote > 0
        ended = (self.lasted > 0 and not lasting) or (lasting and self.lasted + 1 >= c.escape)
        level.learn(x, unit, constant, warm=warm, lasting=lasting, over=ended)
        if not warm and not lasting:
            self.tail = clamp(self.tail * (1 + 0.2 * (vote - 1 / 256)), 1, 8)
        if lasting and ended:
            self.votes, self.lasted = 0.0, 0
        else:
            self.lasted = self.lasted + 1 if lasting else 0
        sustained = lasting and voting
        return alarm, sustained, int(Cause.LOSS_SPIKE) if alarm or sustained else 0


class Divergence:
    """A trend that rises above its best level and does not come back."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.count, self.run, self.latched = 0, 0, False
        self.trend = self.slow = self.best = self.top = 0.0
        self.noise = self.long = self.residual = 0.0

    def see(self, step: Any) -> Finding:
        if step.restart:
            self.count, self.latched = 0, False
        if not step.finite:
            return False, False, 0
        c, x = self.config, step.loss
        warm, share = self.count < c.warmup_steps, 1 / (self.count + 1)
        first = self.count == 0
        if first:
            self.trend = self.slow = x
        off = x - self.trend
        quiet = not self.ties.above(self.noise, abs(self.trend) / 2**18)
        if not warm and not quiet:
            off = clamp(off, -8 * self.noise, 8 * self.noise)
        self.trend += max(share, 1 / 16) * off
        self.slow += max(share, 1 / 64) * (self.trend - self.slow)
        # A ramp is a row of rises: it may not pass for noise.
        up = self.ties.above(off, 0.0, x, self.trend)
        again = up and self.residual > 0 and self.ties.above(off, self.noise, x)
        pace = 0.03 * (0.2 if again else 1.0)
        self.noise += (max(share, pace) if warm else pace) * (abs(off) - self.noise)
        self.long += clamp(2.5 * share, 1 / 512, 1.0) * (abs(off) - self.long)
        self.residual = off
        noise = max(self.noise, 0.5 * self.long)

        self.best += (self.slow - self.best) / 2048
        self.top += (self.slow - self.top) / 2048
        if warm or self.ties.above(self.best, self.slow):
            self.best = self.slow
        if warm or self.ties.above(self.slow, self.top):
            self.top = self.slow
        excess = self.trend - self.best
        bar = max(c.rise * noise, c.given_back * (self.top - self.best), abs(self.best) / 2**12)
        size = (self.trend, self.best)
        high = not warm and self.ties.above(excess, bar, *size)
        falling = self.ties.above(self.slow - self.trend, noise / 4, *size)
        if high and not falling:
            self.run = min(self.run + 1, 2 * c.patience)
        else:
            self.run = max(self.run - 1, 0)
        if first or self.ties.above(bar / 2, excess, *size):
            self.run, self.latched = 0, False
        elif self.run >= c.patience:
            self.latched = True
        self.count += 1
        alarm = self.latched and not falling  # a trend that comes back needs nothing done
        return alarm, alarm, int(Cause.DIVERGENCE) if alarm else 0


class Instability:
    """Records of the loss, each far above the last, while the norm is many times its usual size."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.shared_ties, self.ties = config, ties, Ties()
        """A comparison too close to call, here in `ties`, bears on all that comes after it."""
        self.learnt = 0
        self.row: list[float] = []
        """The records of the growth in progress, one that counts twice two times."""
        self.raised = False
        """Whether there was a record since the loss was last at its level."""
        self.alarmed: float | None = None
        """The last record from an alarm on, until the loss is at its level again."""
        self.since = 0
        """Steps since the last record, or of a loss that is high without one."""
        self.level = self.best = self.top = self.noise = self.usual = 0.0
        self.last = (0.0, 0.0)
        self.norms: list[float] = []
        """Each norm so far, a factor 7/8 less for each step since."""
        self.before = 0.0
        """The largest of them before loss and norm left their levels."""
        self.away: list[float] = []
        """Heights of the losses since then."""
        self.rate = 0.0
        """Moving average of the learning rate."""

    def see(self, step: Any) -> Finding:
        c, x = self.config, step.loss
        if step.restart:
            self.learnt = 0
        if not step.finite:
            return False, False, 0
        if not self.learnt:
            self.row, self.raised, self.alarmed, self.noise = [], False, None, 0.0
            self.level = self.best = self.top = x
            self.usual, self.last = step.norm, (x, 0.0)
            self.norms, self.rate = [], step.rate or 0.0
            self.ties.forget()
        lower = min(x, self.last[0])  # of two steps: one bad batch is none
        height, sizes = lower - self.best, (lower, self.best, self.top)
        least = max(self.top - self.best, abs(self.best) / 2, 4 * self.noise)
        high = self.ties.above(height, least, *sizes)
        new = self._records(height, high, step.norm, sizes)
        if new:
            self.row += new
            self.raised = True
        elif self.row:
            # Back at a quarter of the last record, or nothing new for long: other growth begins.
            back = self.ties.above(self.row[-1] / 4, height, *sizes)
            if back or self.since >= c.patience:
                self.row = []
        self._leave(x, step.norm)
        if self.ties.close:
            self.shared_ties.recall(self.ties.closest)
        alarm = bool(new) and len(self.row) >= c.records + (self.learnt < 16)
        raised = step.rate is not None and self.ties.above(step.rate, 1.02 * self.rate)
        if alarm and not raised and self._is_ramp(height):
            alarm = False
        self.rate += ((step.rate or 0.0) - self.rate) / 32
        settled = high and not new and self.since >= 4 * c.patience
        settled = settled or len(self.away) >= 8 * c.patience
        if not (high or self.row):
            self._learn(x, step.norm)
            self.raised, self.alarmed = False, None
        self._forget(quiet=not (high or self.row))
        self.last = x, step.norm
        self.learnt = 0 if settled else self.learnt + 1
        if alarm:
            self.row = self.row[-1:]  # what has led to an alarm is spent
        if self.row and (alarm or self.alarmed is not None):
            self.alarmed = self.row[-1]
        self.since = self.since + 1 if (high or self.row) and not new and not settled else 0
        return alarm, alarm, int(Cause.INSTABILITY) if alarm else 0

    def _leave(self, x: float, norm: float) -> None:
        """Where loss and norm leave their levels, and how large the norms were just before."""
        self.norms = [norm, *(7 / 8 * each for each in self.norms[:100])]
        above = self.ties.above
        # The norm first: of a constant loss the other comparison is too close to call.
        away = self.learnt and above(norm, 2.0 * self.usual)
        if away and above(x - self.level, 8 * self.noise, x, self.level):
            self.away.append(x - self.best)
        else:
            self.away, self.before = [], max(self.norms)

    def _is_ramp(self, height: float) -> bool:
        """Whether no larger norms preceded the growth, and it is no faster than a square."""
        risen = self.learnt < 16 or self.ties.above(self.before, 2.0 * self.usual)
        first = (self.away or [0.0])[0]
        faster = self.ties.above(height, 2 * len(self.away) ** 2 * first)
        return not risen and not faster

    def _records(self, height: float, high: bool, norm: float, sizes: Any) -> list[float]:
        """The records that this step adds: none, its height once, or twice."""
        c, above = self.config, self.ties.above
        large = c.norm_ratio * self.usual
        if self.raised and not self.row:  # more growth has to be clearer
            large *= 2
        norms = above(norm, large) and above(self.last[1], large)
        if self.learnt < c.warmup_steps or not norms:
            return []
        if not self.row:
            beyond = self.alarmed is None or above(height, c.growth * self.alarmed, *sizes)
            return [height] if high and beyond else []
        if not above(height, c.growth * self.row[-1], *sizes):
            return []
        return [height] * (
            1 + sum(above(height, c.growth**k * self.row[-1], *sizes) for k in (2, 3))
        )

    def _learn(self, x: float, norm: float) -> None:
        """Learns a quiet step: a fall in full, a rise as far as the noise allows."""
        weight = max(1 / (self.learnt + 1), 1 / 8)
        off = x - self.level
        size = min(abs(off), 3 * self.noise) if self.noise > 0 else abs(off)
        self.level += weight * (size if off > 0 else off)
        self.noise += weight * (size - self.noise)
        weight = max(1 / (self.learnt + 1), 1 / 32)
        usual = min(norm, 3 * self.usual) if self.usual > 0 else norm
        self.usual += weight * (usual - self.usual)

    def _forget(self, *, quiet: bool) -> None:
        """Lets the best and the highest level drift towards the level."""
        self.best = min(self.level, self.best + (self.level - self.best) / 512)
        self.top += (self.level - self.top) / 512
        if quiet:
            self.top = max(self.top, self.level)
