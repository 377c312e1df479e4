"""Divergence: the smoothed loss stays above its best level so far.

No spike is needed: a noisy ramp from 2 to 22 has none. For `patience` steps the trend must exceed
its best level by `rise` times the noise, and by the share `HIGH` of its highest excess. The alarm
lasts for at most `patience` steps. Then the current level becomes the best level, and a further
rise is a new alarm.

The noise of a positive loss is often proportional to its level, so it rises with the loss. Where
noise is small compared with the trend, the relative rise is compared with the relative noise:
(trend - best) / best with noise / trend. A logarithm would do the same, but its last bits differ
between NumPy, XLA and torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core import numerics
from healcore.core.detectors import noise
from healcore.core.ranges import Positive, Steps
from healcore.core.signals import Observed
from healcore.core.tree import map_leaves
from healcore.core.verdict import Cause, Reading

HIGH = 0.5  # share of the highest excess from which the trend counts as elevated
POSITIVE = 2.0  # multiple of the noise above which a trend has few losses below zero


class DivergenceState(NamedTuple):
    """The trend, its lowest and highest levels, and the count of elevated steps."""

    values: noise.NoiseState
    trend: Any  # float32: smoothed loss
    best: Any  # float32: lowest trend
    peak: Any  # float32: highest trend since the trend left the best level
    run: Any  # int32: elevated steps minus recovering steps


class DivergenceConfig(NamedTuple):
    """Thresholds of the divergence detector."""

    rise: Positive = 6.0
    """Height of the trend above the best level, in units of the noise at the best level. It also
    limits the distance of one step from the trend."""
    patience: Steps = 72
    """Elevated steps minus recovering steps that raise the alarm."""
    window: Steps = noise.WINDOW
    """Steps learnt before a rise counts; the weight of a step in the trend is 1 / window."""

    CAUSE = Cause.DIVERGENCE
    NEEDS = frozenset({"loss"})

    def init(self) -> DivergenceState:
        """The state before the first step."""
        floats = (np.zeros((), np.float32) for _ in ("trend", "best", "peak"))
        return DivergenceState(noise.init(), *floats, run=np.zeros((), np.int32))

    def update(
        self, state: DivergenceState, seen: Observed, *, xp: Any
    ) -> tuple[DivergenceState, Reading]:
        """Learns `seen.loss`, then compares the trend with the best level."""
        learn, loss = seen.finite, seen.loss
        values, first = noise.begin(state.values, loss, seen.restart, xp=xp)
        warm = values.count < self.window
        trend = xp.where(first, loss, state.trend)
        unit = noise.unit(values, trend, noise.SMALL, xp=xp)
        threshold = numerics.product(self.rise, unit, xp=xp)
        max_distance = xp.where(unit > 0, threshold, numerics.HUGE)
        learnt, weight = noise.learn(values, loss, learn, max_distance, self.window, xp=xp)

        distance = xp.maximum(xp.minimum(loss - trend, max_distance), -max_distance)
        trend = trend + numerics.product(weight, distance, xp=xp)
        best = xp.where(warm, trend, xp.minimum(trend, state.best))
        excess = trend - best
        positive = (best > 0) & (trend > POSITIVE * unit)
        at_best = numerics.quotient(numerics.product(threshold, best, xp=xp), trend, xp=xp)
        high = excess > xp.where(positive, at_best, threshold)
        peak = xp.where(high, xp.maximum(trend, state.peak), trend)
        elevated = high & (excess > HIGH * (peak - best))
        elevated_count = xp.where(elevated, state.run + 1, numerics.sub_one(state.run, xp=xp))
        elevated_count = xp.where(high, elevated_count, 0)
        alarm = learn & elevated & (elevated_count >= self.patience)
        expired = elevated_count >= self.patience + self.patience
        after = DivergenceState(
            learnt,
            numerics.settle(trend, xp=xp),
            numerics.settle(xp.where(expired, trend, best), xp=xp),
            numerics.settle(peak, xp=xp),
            xp.where(expired, 0, elevated_count),
        )
        before = state._replace(values=learnt)
        new = map_leaves(lambda a, b: a if a is b else xp.where(learn, a, b), after, before)
        return new, Reading(alarm, alarm)
