"""Measures a loss curve: ends, noise, trend and instability events."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.core import numerics
from healcore.core.detectors import LossSpikeConfig
from healcore.core.recorded import record
from healcore.core.signals import Observed
from healcore.core.tree import map_leaves
from healcore.tools.probe.inputs import EVENT_SIGMAS

BLOCKS = 1024
MAD_TO_SIGMA = 1.4826
"""Standard deviation of Gaussian noise divided by its median absolute deviation."""
_MEDIAN_TO_MEAN_SIGMA = 1.2533
"""Standard deviation of a median divided by that of a mean, for many values: sqrt(pi / 2)."""
_TREND_POINTS = 64
_ENDS = 0.05
"""Fraction of the curve that counts as its start, and as its end."""

_UNIT_VALUES = 64
"""Least number of values that the noise unit is estimated from."""
_Q90_TO_SIGMA = 1 / 1.2816
"""Standard deviation of Gaussian noise divided by its 90 % quantile."""
_MIN_UNIT = 1e-3
"""Lower bound of the noise unit relative to the level, for curves without noise."""
_ONSET_VALUES, _HIGH_VALUES = 5, 3
"""Consecutive values that decide whether an event begins, and how many of these must be high."""
_RETURN_HEIGHT = 3.0
"""An event ends at the first value less than this many units above the level before the event."""
_MAX_EVENT_VALUES = 200
"""Largest length of an event. A longer rise is a new level, and the baseline starts again."""
_CHUNK = 4096
"""Number of windows in memory at a time."""

_MAX_VALUES = 16_384
"""Largest number of values for the detector. A longer curve is reduced to block medians."""
_HIGH_SIGMAS, _END_FRACTION = 3.0, 0.1
"""An event ends at its last value above 3 standard deviations and above 0.1 of its maximum."""
_MAX_LEAD, _QUIET_VOTES = 12, 0.5
"""An event begins at most 12 values before detection, after the last value with votes below 0.5."""
_CHANGE_TO_SIGMA = 0.886
"""Standard deviation of Gaussian noise divided by the mean absolute difference of neighbours."""


def block_medians(values: np.ndarray, most: int = BLOCKS) -> np.ndarray:
    """Returns medians of equally long blocks of a curve (n,), fewer than `most`.

    The last block counts if it is at least half full.
    """
    size = 1
    while len(values) // size >= most:
        size *= 2
    whole = len(values) // size * size
    medians = np.median(values[:whole].reshape(-1, size), axis=1)
    rest = values[whole:]
    return np.append(medians, np.median(rest)) if 2 * len(rest) >= size else medians


class Shape(NamedTuple):
    """Level of a curve at its start, end and best, with its noise and trend. Lower is better."""

    start: float
    end: float
    best: float
    """Lowest running median over as many values as `end` has."""
    noise: float
    """Standard deviation of a running median."""
    drop: float
    """First value minus `end`, in standard deviations of one value. Large after a fast start."""
    trend: float
    """Mann-Kendall statistic in standard deviations; positive where the curve rises."""

    @property
    def regret(self) -> float:
        """End minus best."""
        return max(0.0, self.end - self.best)


def measure_shape(curve: np.ndarray, least: int = 3) -> Shape:
    """Measures a finite curve, float64 (b,) with b > `least`, the values of each end or more."""
    # Scaled by the largest value, so that differences of very large values stay finite.
    unit = float(np.abs(curve).max()) or 1.0
    scaled = curve / unit
    width = max(least, round(_ENDS * len(curve)))
    medians = np.median(sliding_window_view(scaled, width), axis=1)
    single = _deviation(scaled)
    # The larger of two estimates: from single values as if they were independent, and from medians
    # of adjacent windows, which include slow drift.
    noise = max(single * _MEDIAN_TO_MEAN_SIGMA / math.sqrt(width), _deviation(medians[::-width]))
    return Shape(
        start=unit * float(medians[0]),
        end=unit * float(medians[-1]),
        best=unit * float(medians.min()),
        noise=unit * noise,
        drop=float(scaled[0] - medians[-1]) / single if single > 0 else 0.0,
        trend=_trend(scaled),
    )


def _deviation(curve: np.ndarray) -> float:
    """Estimates the standard deviation of the noise of a curve (b,); 0 for fewer than 4 values.

    Uses second differences, which remove a slope and multiply the variance of white noise by six.
    The estimate is enlarged for few values, whose median may be small by chance.
    """
    if len(curve) < 4:
        return 0.0
    bends = np.abs(np.diff(curve, 2))
    return MAD_TO_SIGMA * float(np.median(bends)) / math.sqrt(6) * (1 + 4 / len(bends))


def _trend(curve: np.ndarray) -> float:
    """Computes the Mann-Kendall statistic of a finite curve (b,), over at most 64 means.

    The variance is corrected for the autocorrelation around the Theil-Sen slope (Hamed and Rao,
    1998). Without the correction, any long curve with slow drift has a significant trend.
    """
    parts = np.array_split(curve, min(_TREND_POINTS, len(curve)))
    points = np.array([part.mean() for part in parts])
    n = len(points)
    later, earlier = np.tril_indices(n, -1)
    rises = points[later] - points[earlier]
    score = float(np.sign(rises).sum())
    _, ties = np.unique(points, return_counts=True)
    variance = n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())
    if variance <= 0:
        return 0.0
    residuals = points - float(np.median(rises / (later - earlier))) * np.arange(n)
    spread = residuals - residuals.mean()
    power = float((spread**2).sum())
    correlation = float((spread[1:] * spread[:-1]).sum()) / power if power > 0 else 0.0
    bounded = min(max(correlation, 0.0), 0.9)
    variance *= (1 + bounded) / (1 - bounded) / 18
    return (score - math.copysign(1, score) if score else 0.0) / math.sqrt(variance)


# -- instability events, by sliding windows and by the spike detector -----------------------------


class Event(NamedTuple):
    """One instability event, from step `step` to step `last`, over `values` logged values."""

    step: float
    values: int
    height: float
    """Highest value minus the level before the event, in noise units."""
    back: bool
    """Whether the curve returned to the level before the event."""
    last: float


class Events(NamedTuple):
    """Instability events of a curve, in order."""

    events: tuple[Event, ...]
    jumps: int
    """Number of single high values: bad batches."""
    unfinished: Event | None
    """The event that the curve ends in, or None."""


def find_events(steps: np.ndarray, values: np.ndarray, sigmas: float, window: int) -> Events:
    """Finds the events of a curve, float64 (n,) both.

    The detector adds the events that overlap no event of the windows.
    """
    found, jumps, unfinished = window_events(steps, values, sigmas, window)
    new = [
        other
        for other in detector_events(steps, values, sigmas)
        if not any(known.step <= other.last and other.step <= known.last for known in found)
    ]
    alone = sum(not any(event.step <= step <= event.last for event in new) for step in jumps)
    return Events(tuple(sorted([*found, *new])), alone, unfinished)


def window_events(
    steps: np.ndarray, values: np.ndarray, sigmas: float, window: int
) -> tuple[list[Event], list[float], Event | None]:
    """Returns the events, the steps of single high values, and the event that the curve ends in.

    The level of a value is the median of the `window` values before it. The noise unit is a robust
    deviation of the last 64 values (or four windows) from their levels. The unit is the larger of
    two estimates, from the median and from the upper tail, because noise may be one-sided. An
    event begins where 3 of five values in a row are more than `sigmas` units high. A single high
    value is a bad batch and counts as a jump.
    """
    unit_window = max(_UNIT_VALUES, 4 * window)
    with np.errstate(invalid="ignore", over="ignore"):
        levels = _rolling(values, window, lambda windows: np.median(windows, axis=1))
        rises = values - levels
        units = np.maximum(_rolling(rises, unit_window, _noise), _MIN_UNIT * np.abs(levels))
        units = np.where(units > 0, units, np.inf)
        high = np.flatnonzero(rises / units > sigmas)
    events: list[Event] = []
    jumps: list[float] = []
    unfinished = None
    following = 2 * window  # levels before this value are unreliable
    for onset in high.tolist():
        if onset < following:  # inside the previous event
            continue
        over = (values[onset : onset + _MAX_EVENT_VALUES] - levels[onset]) / units[onset]
        # After many recent jumps, several high values in a row may be chance.
        recent = rises[max(0, onset - unit_window) : onset] / units[onset] > sigmas
        needed = _ONSET_VALUES + 2 * int(np.count_nonzero(recent))
        if np.count_nonzero(over[:needed] > sigmas) < _HIGH_VALUES * needed / _ONSET_VALUES:
            jumps.append(float(steps[onset]))
            following = onset + 1
            continue
        # A low value among the first values does not end an event.
        low = _HIGH_VALUES + np.flatnonzero(over[_HIGH_VALUES:] < _RETURN_HEIGHT)
        length = int(low[0]) if len(low) else len(over)
        following = onset + length
        first, last = float(steps[onset]), float(steps[following - 1])
        events.append(Event(first, length, float(over[:length].max()), bool(len(low)), last))
        if not len(low) and length < _MAX_EVENT_VALUES:
            unfinished = events[-1]
    return events, jumps, unfinished


def _rolling(
    values: np.ndarray, window: int, function: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Applies a function to the `window` values before each value; NaN before the first value."""
    if not len(values):
        return np.empty(0)
    windows = sliding_window_view(np.append(np.full(window, np.nan), values[:-1]), window)
    parts = [function(windows[at : at + _CHUNK]) for at in range(0, len(windows), _CHUNK)]
    return np.concatenate(parts)


def _noise(windows: np.ndarray) -> np.ndarray:
    """Robust standard deviation of the noise in each window, float64 (k, n) -> (k,)."""
    # The NaN variants are several times slower, and only partly filled windows need them.
    full = not np.isnan(windows).any()
    known = windows if full else windows[~np.isnan(windows).all(axis=1)]
    median, quantile = (np.median, np.quantile) if full else (np.nanmedian, np.nanquantile)
    spread = MAD_TO_SIGMA * median(np.abs(known), axis=1)
    units = np.maximum(spread, _Q90_TO_SIGMA * quantile(known, 0.9, axis=1))
    return np.append(np.full(len(windows) - len(known), np.nan), units)


def detector_events(steps: np.ndarray, values: np.ndarray, sigmas: float) -> list[Event]:
    """Finds events with the spike detector, `LossSpikeConfig`.

    The detector learns the noise of the run. It finds events that windows miss: a spike soon after
    another spike, recurring high values, and rises that begin slowly. It takes about 40 us per
    value, so a long curve is reduced to block medians. `sigmas` scales its threshold.
    """
    default = LossSpikeConfig()
    config = default._replace(z_threshold=default.z_threshold * sigmas / EVENT_SIGMAS)
    steps, reduced = block_medians(steps, _MAX_VALUES), block_medians(values, _MAX_VALUES)
    size = max(1, round(len(values) / max(1, len(reduced))))
    votes, heights, sustained = _run_detector(map_leaves(_scalar, config), reduced)
    edges = np.diff(sustained.astype(np.int8), prepend=0, append=0)
    spans: list[tuple[int, int]] = []
    events: list[Event] = []
    for onset, end in zip(np.flatnonzero(edges > 0), np.flatnonzero(edges < 0), strict=True):
        first = max(0, onset - _MAX_LEAD)
        quiet = np.flatnonzero(votes[first:onset] < _QUIET_VOTES)
        first += int(quiet[-1]) + 1 if len(quiet) else 0
        rising = first + np.flatnonzero(heights[first:onset] > _HIGH_SIGMAS)
        # A small sustained rise has no value above _HIGH_SIGMAS.
        first = int(rising[0]) if len(rising) else int(onset)
        if spans and first <= spans[-1][1]:  # the votes have not faded, so the last event continues
            first = spans.pop()[0]
            events.pop()
        height = float(heights[first:end].max())
        over = max(_HIGH_SIGMAS, _END_FRACTION * height)
        high = first + np.flatnonzero(heights[first:end] > over)
        last = int(high[-1]) if len(high) else int(end) - 1
        back = bool(end < len(steps) and end - onset < 2 * config.window)
        spans.append((first, last))
        length = (last + 1 - first) * size
        events.append(Event(float(steps[first]), length, height, back, float(steps[last])))
    return events


def _run_detector(config: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns votes, heights in standard deviations, and sustained flags, each (n,)."""
    losses = numerics.bounded(values.astype(np.float32), True, xp=np)
    state = map_leaves(_scalar, config.init())
    true, false = np.bool_(True), np.bool_(False)
    rows, update = [], None
    with np.errstate(all="ignore"):  # as in the engine
        for loss in losses:
            observed = Observed(loss, None, None, None, None, false, None, None, true, None, false)
            update = update or record(config.update, state, observed)
            state, reading = update(state, observed)
            # `lasting` keeps an event open over single steps that return to the level.
            sustained = reading.sustained or state.lasting > 0
            rows.append((state.votes, reading.z / _CHANGE_TO_SIGMA, sustained))
    votes, heights, sustained = np.array(rows, np.float64).reshape(-1, 3).T
    return votes, heights, sustained.astype(np.bool_)


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
