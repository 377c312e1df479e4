"""Finds instability events, by sliding windows (`Events`) and a detector (`Incidents`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.core import numerics
from healcore.core.detectors import LossSpikeConfig
from healcore.core.recorded import record
from healcore.core.signals import Observed
from healcore.core.tree import map_leaves
from healcore.tools.probe.inputs import EVENT_POINTS, EVENT_SIGMAS, ROLLING_WINDOW
from healcore.tools.probe.loss_curve import OF_DEVIATION, Blocks

_SPREAD = 64
"""Values whose deviations from their level give the unit; at least four windows."""
_OF_QUANTILE = 1 / 1.2816
"""Standard deviation of Gaussian noise over its 90 % quantile."""
_FLOOR = 1e-3
"""Lower bound of the unit relative to the level, for curves without noise."""
_SUSTAINED = 5
_BACK = 3.0
"""An event ends at the first value that is less than this many units above the earlier level."""
_LONGEST = 200
"""Values. A longer rise is a new level: the event ends, and the baseline starts again."""
_KEPT = 1000

MOST = 16_384
"""Largest number of judged values; a longer curve is reduced to medians of neighbours."""
_HIGH, _LEFT = 3.0, 0.1
"""An incident lasts from its first value above 3 standard deviations to its last value that is also
above a tenth of its maximum."""
_REACH, _FADED = 12, 0.5
"""The onset is at most 12 values before detection, and after the last value at which the detector's
votes were below 0.5."""
_SIGMA = 0.886
"""Standard deviation of Gaussian noise over its mean absolute difference of successive values."""
_YES, _NO = np.bool_(True), np.bool_(False)


class Event(NamedTuple):
    """One instability event."""

    step: float
    values: int
    height: float
    """Highest value minus the level before it, in noise units."""
    back: bool
    """Whether the curve returned to the level before it."""
    last: float


class Events:
    """Finds events in a stream of finite values, by sliding windows.

    A value is compared with the median of the `window` values before it. The unit is a robust
    deviation of the last 64 values (or four windows) from such medians: the larger of an estimate
    from their median and an estimate from their upper tail, because noise may be one-sided. An
    event begins where `points` of five values in a row are more than `sigmas` units high. A single
    high value is a bad batch and counts as a jump.
    """

    def __init__(self, sigmas: float, points: int, window: int = ROLLING_WINDOW) -> None:
        self._level = window
        self._spread = max(_SPREAD, 4 * window)
        self.found: list[Event] = []
        """The first 1000."""
        self.count = 0
        self.jumps = 0
        self.unfinished: Event | None = None
        """The event that lasts until the end of the curve."""
        self._jumps: list[float] = []
        self._sigmas = sigmas
        self._points = points
        self._steps = np.empty(0)
        self._values = np.empty(0)
        self._levels = np.empty(0)
        """Medians before each value, NaN where there are too few; some are known after `_at`."""
        self._at = 0

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds the next values, float64 (n,) both."""
        self._steps = np.concatenate([self._steps, steps])
        self._values = np.concatenate([self._values, values])
        # Whole events only: those near the end of the buffer wait for more values.
        if len(self._values) - self._at >= 2 * _LONGEST:
            self._judge(len(self._values) - _LONGEST)
            self._forget()

    def finish(self) -> None:
        """Judges the remaining values at the end of the curve."""
        self._judge(len(self._values))

    def include(self, others: list[Event]) -> None:
        """Adds events that do not overlap, and no longer counts the jumps inside them."""
        new = [
            each
            for each in others
            if not any(mine.step <= each.last and each.step <= mine.last for mine in self.found)
        ]
        within = [
            step for step in self._jumps if any(each.step <= step <= each.last for each in new)
        ]
        self.jumps -= len(within)
        self.count += len(new)
        self.found = sorted([*self.found, *new], key=lambda event: event.step)[:_KEPT]

    def _judge(self, until: int) -> None:
        """Judges the values before `until`. An event may end later."""
        self._levels = np.append(self._levels, self._levels_from(len(self._levels), until))
        first = max(self._at, 2 * self._level)  # fewer values before it are no level
        if first >= until:
            return
        units = self._units(first, until)
        with np.errstate(invalid="ignore", over="ignore"):
            rises = self._values[first:until] - self._levels[first:until]
            high = np.flatnonzero(rises > self._sigmas * units)
        self._at = first
        for onset in high + first:
            if onset >= self._at:  # not inside the event before
                self._at = self._event(int(onset), self._levels[onset], units[onset - first])
        self._at = max(self._at, until)

    def _event(self, onset: int, level: float, unit: float) -> int:
        """Counts a jump or an event at `onset`; returns the index after it."""
        over = (self._values[onset : onset + _LONGEST] - level) / unit
        # Where single values jump often, several in a row may be chance: with more jumps the curve
        # must stay high for longer.
        recent = slice(max(0, onset - self._spread), onset)
        jumps = (self._values[recent] - self._levels[recent]) / unit > self._sigmas
        needed = _SUSTAINED + 2 * int(np.count_nonzero(jumps))
        if np.count_nonzero(over[:needed] > self._sigmas) < self._points * needed / _SUSTAINED:
            self.jumps += 1
            if len(self._jumps) < _KEPT:
                self._jumps.append(float(self._steps[onset]))
            return onset + 1
        back = np.flatnonzero(over < _BACK)
        # One low value among the first five does not end an event.
        back = back[back >= self._points]
        length = int(back[0]) if len(back) else len(over)
        self.count += 1
        event = Event(
            float(self._steps[onset]),
            length,
            float(over[:length].max()),
            bool(len(back)),
            float(self._steps[onset + length - 1]),
        )
        if len(self.found) < _KEPT:
            self.found.append(event)
        if not event.back and length < _LONGEST:
            self.unfinished = event
        return onset + length

    def _levels_from(self, first: int, until: int) -> np.ndarray:
        if until <= first:
            return np.empty(0)
        missing = max(0, min(self._level, until) - first)
        windows = (
            sliding_window_view(self._values[: until - 1], self._level)
            if until > self._level
            else None
        )
        if windows is None:
            return np.full(missing, np.nan)
        with np.errstate(over="ignore", invalid="ignore"):
            levels = np.median(windows[max(0, first - self._level) :], axis=1)
        return np.append(np.full(missing, np.nan), levels)

    def _units(self, first: int, until: int) -> np.ndarray:
        """Robust standard deviation before each value, float64 (until - first,)."""
        with np.errstate(invalid="ignore", over="ignore"):
            residuals = self._values[: until - 1] - self._levels[: until - 1]
            padded = np.append(np.full(self._spread, np.nan), residuals)
            windows = sliding_window_view(padded, self._spread)[first:until]
            # The NaN variants are several times slower: only for windows that are not full.
            full = first >= self._spread + self._level
            median, quantile = (np.median, np.quantile) if full else (np.nanmedian, np.nanquantile)
            spread = OF_DEVIATION * median(np.abs(windows), axis=1)
            units = np.maximum(spread, _OF_QUANTILE * quantile(windows, 0.9, axis=1))
        units = np.maximum(units, _FLOOR * np.abs(self._levels[first:until]))
        return np.where(units > 0, units, np.inf)

    def _forget(self) -> None:
        cut = max(0, min(self._at, len(self._levels)) - self._spread - self._level)
        self._steps, self._values = self._steps[cut:], self._values[cut:]
        self._levels = self._levels[cut:]
        self._at -= cut


class Incidents:
    """Finds events in a stream of finite values with `LossSpikeConfig`.

    The detector learns the noise of the run, so it finds what windows cannot: a spike soon after
    another, recurring high values, and rises that begin slowly. It takes about 40 us per value, so
    a long curve is reduced to medians of neighbours. Thresholds are proportional to `sigmas` and
    `points`.
    """

    def __init__(self, sigmas: float, points: int) -> None:
        least = LossSpikeConfig()
        config = least._replace(
            z_threshold=least.z_threshold * sigmas / EVENT_SIGMAS,
            evidence=least.evidence * points / EVENT_POINTS,
        )
        self._config = map_leaves(_scalar, config)
        self._steps = Blocks(MOST)
        self._values = Blocks(MOST)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds the next values, float64 (n,) both."""
        self._steps.add(steps)
        self._values.add(values)

    def finish(self) -> list[Event]:
        """All events, at the end of the curve."""
        steps = self._steps.medians()
        votes, heights, sustained = self._judged(self._values.medians())
        edges = np.diff(sustained.astype(np.int8), prepend=0, append=0)
        found: list[Event] = []
        begun, last = 0, -1
        for onset, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
            first = max(0, onset - _REACH)
            quiet = np.flatnonzero(votes[first:onset] < _FADED)
            first += int(quiet[-1]) + 1 if len(quiet) else 0
            rising = first + np.flatnonzero(heights[first:onset] > _HIGH)
            # A small sustained rise has no value above _HIGH.
            first = int(rising[0]) if len(rising) else int(onset)
            if first <= last:  # the votes have not faded: the last event continues
                first = begun
                found.pop()
            over = max(_HIGH, _LEFT * heights[first:end].max())
            high = first + np.flatnonzero(heights[first:end] > over)
            last = int(high[-1]) if len(high) else int(end) - 1
            begun = first
            found.append(
                Event(
                    step=float(steps[first]),
                    values=(last + 1 - first) * self._values.size,
                    height=float(heights[first:end].max()),
                    back=bool(end < len(steps) and end - onset < 2 * self._config.window),
                    last=float(steps[last]),
                )
            )
        return found

    def _judged(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The detector's votes, heights in standard deviations and sustained flags, (n,) each."""
        losses = numerics.bounded(values.astype(np.float32), True, xp=np)
        state = map_leaves(_scalar, self._config.init())
        votes, heights = np.zeros(len(losses)), np.zeros(len(losses))
        sustained = np.zeros(len(losses), np.bool_)
        # Overflows and divisions by 0 are intended, as in the engine.
        update = None
        with np.errstate(all="ignore"):
            for at, loss in enumerate(losses):
                seen = Observed(loss, None, None, None, None, _NO, None, None, _YES, None, _NO)
                if update is None:
                    update = record(self._config.update, state, seen)
                state, reading = update(state, seen)
                # An incident includes its steps that are back at the level.
                votes[at], sustained[at] = state.votes, reading.sustained or state.lasting > 0
                heights[at] = reading.z / _SIGMA
        return votes, heights, sustained


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
