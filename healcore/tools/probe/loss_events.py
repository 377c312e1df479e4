"""Finds instability events in a loss curve, with sliding windows and with the spike detector."""

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
from healcore.tools.probe.loss_curve import MAD_TO_SIGMA, Blocks

_UNIT_VALUES = 64
"""Least number of values that the noise unit is estimated from."""
_Q90_TO_SIGMA = 1 / 1.2816
"""Standard deviation of Gaussian noise divided by its 90 % quantile."""
_MIN_UNIT = 1e-3
"""Lower bound of the noise unit relative to the level, for curves without noise."""
_ONSET_VALUES = 5
"""Consecutive values that decide whether an event begins."""
_RETURN_HEIGHT = 3.0
"""An event ends at the first value less than this many units above the level before the event."""
_MAX_EVENT_VALUES = 200
"""Largest length of an event. A longer rise is a new level, and the baseline starts again."""
_MAX_KEPT = 1000

MAX_VALUES = 16_384
"""Largest number of values for the detector. A longer curve is reduced to block medians."""
_HIGH_SIGMAS, _END_FRACTION = 3.0, 0.1
"""An event ends at its last value above 3 standard deviations and above 0.1 of its maximum."""
_MAX_LEAD, _QUIET_VOTES = 12, 0.5
"""An event begins at most 12 values before detection, after the last value with votes below 0.5."""
_CHANGE_TO_SIGMA = 0.886
"""Standard deviation of Gaussian noise divided by the mean absolute difference of neighbours."""
_TRUE, _FALSE = np.bool_(True), np.bool_(False)


class Event(NamedTuple):
    """One instability event, from step `step` to step `last`, over `values` logged values."""

    step: float
    values: int
    height: float
    """Highest value minus the level before the event, in noise units."""
    back: bool
    """Whether the curve returned to the level before the event."""
    last: float


class WindowEventFinder:
    """Finds events in a stream of finite values, with sliding windows.

    The level of a value is the median of the `window` values before it. The noise unit is a robust
    deviation of the last 64 values (or four windows) from their levels. The unit is the larger of
    two estimates, from the median and from the upper tail, because noise may be one-sided. An
    event begins where `points` of five values in a row are more than `sigmas` units high. A single
    high value is a bad batch and counts as a jump.
    """

    def __init__(self, sigmas: float, points: int, window: int = ROLLING_WINDOW) -> None:
        self._window = window
        self._unit_window = max(_UNIT_VALUES, 4 * window)
        self.events: list[Event] = []
        """The first 1000 events."""
        self.count = 0
        self.jumps = 0
        self.unfinished: Event | None = None
        """The event that the curve ends in, or None."""
        self._jumps: list[float] = []
        self._sigmas = sigmas
        self._points = points
        self._steps = np.empty(0)
        self._values = np.empty(0)
        self._levels = np.empty(0)
        """Level of each value, NaN for the first `window` values."""
        self._next = 0
        """Place of the next value to judge."""

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds the next values, float64 (n,) both."""
        self._steps = np.concatenate([self._steps, steps])
        self._values = np.concatenate([self._values, values])
        # An event near the end of the buffer has to wait for its remaining values.
        if len(self._values) - self._next >= 2 * _MAX_EVENT_VALUES:
            self._judge(len(self._values) - _MAX_EVENT_VALUES)
            self._forget()

    def finish(self) -> None:
        """Judges the remaining values at the end of the curve."""
        self._judge(len(self._values))

    def include(self, others: list[Event]) -> None:
        """Adds the events that overlap no known event, and subtracts the jumps inside them."""
        new = [
            other
            for other in others
            if not any(
                known.step <= other.last and other.step <= known.last for known in self.events
            )
        ]
        self.jumps -= sum(
            any(event.step <= step <= event.last for event in new) for step in self._jumps
        )
        self.count += len(new)
        self.events = sorted([*self.events, *new], key=lambda event: event.step)[:_MAX_KEPT]

    def _judge(self, until: int) -> None:
        """Judges the values before `until`. An event may end after `until`."""
        self._levels = np.append(self._levels, self._levels_from(len(self._levels), until))
        first = max(self._next, 2 * self._window)  # levels before this value are unreliable
        if first >= until:
            return
        units = self._units(first, until)
        with np.errstate(invalid="ignore", over="ignore"):
            rises = self._values[first:until] - self._levels[first:until]
            high = np.flatnonzero(rises > self._sigmas * units)
        self._next = first
        for onset in high + first:
            if onset >= self._next:  # not inside the previous event
                self._next = self._event(int(onset), self._levels[onset], units[onset - first])
        self._next = max(self._next, until)

    def _event(self, onset: int, level: float, unit: float) -> int:
        """Counts a jump or an event at `onset`. Returns the place after its last value."""
        over = (self._values[onset : onset + _MAX_EVENT_VALUES] - level) / unit
        # After many recent jumps, several high values in a row may be chance.
        recent = slice(max(0, onset - self._unit_window), onset)
        jumps = (self._values[recent] - self._levels[recent]) / unit > self._sigmas
        needed = _ONSET_VALUES + 2 * int(np.count_nonzero(jumps))
        if np.count_nonzero(over[:needed] > self._sigmas) < self._points * needed / _ONSET_VALUES:
            self.jumps += 1
            if len(self._jumps) < _MAX_KEPT:
                self._jumps.append(float(self._steps[onset]))
            return onset + 1
        low = np.flatnonzero(over < _RETURN_HEIGHT)
        # A low value among the first `points` values does not end an event.
        low = low[low >= self._points]
        length = int(low[0]) if len(low) else len(over)
        self.count += 1
        event = Event(
            float(self._steps[onset]),
            length,
            float(over[:length].max()),
            bool(len(low)),
            float(self._steps[onset + length - 1]),
        )
        if len(self.events) < _MAX_KEPT:
            self.events.append(event)
        if not event.back and length < _MAX_EVENT_VALUES:
            self.unfinished = event
        return onset + length

    def _levels_from(self, first: int, until: int) -> np.ndarray:
        if until <= first:
            return np.empty(0)
        missing = max(0, min(self._window, until) - first)
        if until <= self._window:
            return np.full(missing, np.nan)
        windows = sliding_window_view(self._values[: until - 1], self._window)
        with np.errstate(over="ignore", invalid="ignore"):
            levels = np.median(windows[max(0, first - self._window) :], axis=1)
        return np.append(np.full(missing, np.nan), levels)

    def _units(self, first: int, until: int) -> np.ndarray:
        """Robust standard deviation of the noise before each value, float64 (until - first,)."""
        with np.errstate(invalid="ignore", over="ignore"):
            residuals = self._values[: until - 1] - self._levels[: until - 1]
            padded = np.append(np.full(self._unit_window, np.nan), residuals)
            windows = sliding_window_view(padded, self._unit_window)[first:until]
            # The NaN variants are several times slower, and only partly filled windows need them.
            full = first >= self._unit_window + self._window
            median, quantile = (np.median, np.quantile) if full else (np.nanmedian, np.nanquantile)
            spread = MAD_TO_SIGMA * median(np.abs(windows), axis=1)
            units = np.maximum(spread, _Q90_TO_SIGMA * quantile(windows, 0.9, axis=1))
        units = np.maximum(units, _MIN_UNIT * np.abs(self._levels[first:until]))
        return np.where(units > 0, units, np.inf)

    def _forget(self) -> None:
        cut = max(0, min(self._next, len(self._levels)) - self._unit_window - self._window)
        self._steps, self._values = self._steps[cut:], self._values[cut:]
        self._levels = self._levels[cut:]
        self._next -= cut


class DetectorEventFinder:
    """Finds events in a stream of finite values with the spike detector, `LossSpikeConfig`.

    The detector learns the noise of the run. It finds events that windows miss: a spike soon after
    another spike, recurring high values, and rises that begin slowly. It takes about 40 us per
    value, so a long curve is reduced to block medians. `sigmas` and `points` scale its thresholds.
    """

    def __init__(self, sigmas: float, points: int) -> None:
        default = LossSpikeConfig()
        config = default._replace(
            z_threshold=default.z_threshold * sigmas / EVENT_SIGMAS,
            evidence=default.evidence * points / EVENT_POINTS,
        )
        self._config = map_leaves(_scalar, config)
        self._steps = Blocks(MAX_VALUES)
        self._values = Blocks(MAX_VALUES)

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Adds the next values, float64 (n,) both."""
        self._steps.add(steps)
        self._values.add(values)

    def finish(self) -> list[Event]:
        """Returns the events of the whole curve."""
        steps = self._steps.medians()
        votes, heights, sustained = self._run_detector(self._values.medians())
        edges = np.diff(sustained.astype(np.int8), prepend=0, append=0)
        events: list[Event] = []
        last_first, last = 0, -1
        for onset, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
            first = max(0, onset - _MAX_LEAD)
            quiet = np.flatnonzero(votes[first:onset] < _QUIET_VOTES)
            first += int(quiet[-1]) + 1 if len(quiet) else 0
            rising = first + np.flatnonzero(heights[first:onset] > _HIGH_SIGMAS)
            # A small sustained rise has no value above _HIGH_SIGMAS.
            first = int(rising[0]) if len(rising) else int(onset)
            if first <= last:  # the votes have not faded, so the last event continues
                first = last_first
                events.pop()
            over = max(_HIGH_SIGMAS, _END_FRACTION * heights[first:end].max())
            high = first + np.flatnonzero(heights[first:end] > over)
            last = int(high[-1]) if len(high) else int(end) - 1
            last_first = first
            events.append(
                Event(
                    step=float(steps[first]),
                    values=(last + 1 - first) * self._values.size,
                    height=float(heights[first:end].max()),
                    back=bool(end < len(steps) and end - onset < 2 * self._config.window),
                    last=float(steps[last]),
                )
            )
        return events

    def _run_detector(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns votes, heights in standard deviations, and sustained flags, each (n,)."""
        losses = numerics.bounded(values.astype(np.float32), True, xp=np)
        state = map_leaves(_scalar, self._config.init())
        votes, heights = np.zeros(len(losses)), np.zeros(len(losses))
        sustained = np.zeros(len(losses), np.bool_)
        # The engine also allows overflows and divisions by 0.
        update = None
        with np.errstate(all="ignore"):
            for at, loss in enumerate(losses):
                observed = Observed(
                    loss, None, None, None, None, _FALSE, None, None, _TRUE, None, _FALSE
                )
                if update is None:
                    update = record(self._config.update, state, observed)
                state, reading = update(state, observed)
                # `lasting` keeps an event open over single steps that return to the level.
                votes[at], sustained[at] = state.votes, reading.sustained or state.lasting > 0
                heights[at] = reading.z / _CHANGE_TO_SIGMA
        return votes, heights, sustained


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
