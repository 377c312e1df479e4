"""Instability events as healcore's own loss spike detector sees them in a live run.

It learns how far the values of this run stray, so it sees what the windows of `events.py` cannot:
a second spike soon after a first one, high values that come back again and again, and rises that
begin slowly. One value costs it some 40 us: of a long curve it judges medians of neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from healcore.core import host, numerics
from healcore.core.detectors import loss_spike
from healcore.core.signals import Observed
from healcore.core.tree import map_leaves
from healcore.tools.probe.loss.events import POINTS, SIGMAS, Event
from healcore.tools.probe.loss.reduction import Blocks

MOST = 16_384
"""Most values that are judged; of a longer curve medians of 2, 4, 8... neighbours, half as many at
least."""
_HIGH, _LEFT = 3.0, 0.1
"""An event lasts from its first value 3 standard deviations high to the last that is as high, and a
tenth of its height."""
_REACH, _FADED = 12, 0.5
"""It may have begun up to 12 values before it was certain, but not before the detector's votes were
last below 0.5."""
_SIGMA = 1.25
"""Mean absolute residuals in a standard deviation of Gaussian noise."""
_YES, _NO = np.bool_(True), np.bool_(False)


class Incidents:
    """Finds them in a stream of finite values.

    Args:
        sigmas: height of an event; at its default the detector has the thresholds of the policies.
        points: how many such values make one, likewise.
    """

    def __init__(self, sigmas: float, points: int) -> None:
        least = loss_spike.Config()
        config = least._replace(
            z_threshold=least.z_threshold * sigmas / SIGMAS,
            evidence=least.evidence * points / POINTS,
        )
        self._config = map_leaves(_scalar, config)
        self._steps = Blocks(MOST)
        self._values = Blocks(MOST)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Takes the next values, float64 (n,) both."""
        self._steps.add(steps)
        self._values.add(values)

    def finish(self) -> list[Event]:
        """All of them; there are no more values."""
        steps = self._steps.medians()
        votes, heights, sustained = self._judged(self._values.medians())
        edges = np.diff(sustained.astype(np.int8), prepend=0, append=0)
        found = []
        for onset, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
            first = max(0, onset - _REACH)
            quiet = np.flatnonzero(votes[first:onset] < _FADED)
            first += int(quiet[-1]) + 1 if len(quiet) else 0
            rising = first + np.flatnonzero(heights[first:onset] > _HIGH)
            # A small rise that lasts has no high values.
            first = int(rising[0]) if len(rising) else int(onset)
            over = max(_HIGH, _LEFT * heights[first:end].max())
            high = first + np.flatnonzero(heights[first:end] > over)
            last = int(high[-1]) if len(high) else int(end) - 1
            found.append(
                Event(
                    step=float(steps[first]),
                    values=(last + 1 - first) * self._values.size,
                    height=float(heights[first:end].max()),
                    back=bool(end < len(steps) and end - onset < self._config.escape),
                    last=float(steps[last]),
                )
            )
        return found

    def _judged(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Votes, heights in standard deviations, and whether it is sustained, (n,) each."""
        losses = numerics.bounded(values.astype(np.float32), True, xp=np)
        state = map_leaves(_scalar, loss_spike.init(self._config))
        votes, heights = np.zeros(len(losses)), np.zeros(len(losses))
        sustained = np.zeros(len(losses), np.bool_)
        # Overflows and divisions by 0 are meant, as in the engine.
        with np.errstate(all="ignore"):
            for at, loss in enumerate(losses):
                seen = Observed(loss, None, None, None, None, _NO, None, None, _YES, None, _NO)
                state, reading = loss_spike.update(self._config, state, seen, xp=host)
                # The incident, with the steps in it that are back at the level.
                votes[at], sustained[at] = state.votes, reading.sustained or state.incident > 0
                heights[at] = reading.z / _SIGMA
        return votes, heights, sustained


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
