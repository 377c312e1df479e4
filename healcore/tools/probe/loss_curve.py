"""Measures a loss curve: ends, noise, trend and instability events."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.core.detectors import LossSpikeConfig
from healcore.core.signals import CheckedSignals, sanitized
from healcore.core.tape import to_program
from healcore.core.trees import map_leaves
from healcore.history.run_history import alarm_spans
from healcore.tools.probe.checks import EVENT_SIGMAS, MAD_TO_SIGMA

BLOCKS = 1024
"""Largest number of block medians to which a curve is reduced."""
_MEDIAN_TO_MEAN_SIGMA = 1.2533
"""Standard deviation of a median divided by the standard deviation of a mean, for many values:
sqrt(pi / 2)."""
_TREND_POINTS = 64
"""Number of means over which the trend is computed."""
_END_SHARE = 0.05
"""Fraction of the curve that counts as its start, and as its end."""
_MAX_VALUES = 16_384
"""Largest number of values for the detector. A longer curve is reduced to block medians."""
_CHANGE_TO_SIGMA = 0.886
"""Standard deviation of Gaussian noise divided by the mean absolute difference of neighbours."""


def block_medians(values: np.ndarray, max_blocks: int = BLOCKS) -> np.ndarray:
    """Reduces a curve to the medians of equally long blocks, which keep its level and lose noise.

    Args:
        values: the curve, float (n,).
        max_blocks: upper bound of the number of whole blocks. A shorter curve keeps its values.

    Returns:
        The medians, float (b,). The last block counts if it is at least half full.
    """
    size = 1
    while len(values) // size >= max_blocks:
        size *= 2
    whole = len(values) // size * size
    medians = np.median(values[:whole].reshape(-1, size), axis=1)
    rest = values[whole:]
    if 2 * len(rest) >= size:
        return np.append(medians, np.median(rest))
    return medians


def values_to_learn(number: int, window: int) -> int:
    """Number of values at the start of a curve in which `find_events` finds no event.

    Args:
        number: number of finite values of the curve.
        window: values, or block medians of a long curve, from which the detector learns the noise.

    Returns:
        The number of values.
    """
    size = 1
    while number // size >= _MAX_VALUES:  # as in `block_medians`
        size *= 2
    return min(window * size, number)


class Shape(NamedTuple):
    """Level of a curve at its start, end and best, with its noise and trend. Lower is better.

    A level is a running median over a twentieth of the curve, so that no single value decides. The
    checks of the loss probe compare these numbers with each other and with the noise, so that they
    need no bound for the scale of the loss.
    """

    start: float
    """Level at the start."""
    end: float
    """Level at the end."""
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
        """End minus best, at least 0, in the unit of the curve.

        The run has lost this progress again. A run that stopped at its best has 0.
        """
        return max(0.0, self.end - self.best)


def measure_shape(curve: np.ndarray) -> Shape:
    """Measures the levels, the noise and the trend of a curve.

    Args:
        curve: finite values, float64 (b,) with b > 3, usually from `block_medians`.

    Returns:
        The shape, in the unit of the curve.
    """
    # Scaled by the largest value, so that differences of very large values stay finite.
    unit = float(np.abs(curve).max()) or 1.0
    scaled = curve / unit
    width = max(3, round(_END_SHARE * len(curve)))
    medians = np.median(sliding_window_view(scaled, width), axis=1)
    single = _deviation(scaled)
    # The larger of two estimates: from single values as if they were independent, and from medians
    # of adjacent windows, which include slow drift.
    noise = max(single * _MEDIAN_TO_MEAN_SIGMA / math.sqrt(width), _deviation(medians[::-width]))
    drop = 0.0
    if single > 0:
        drop = float(scaled[0] - medians[-1]) / single
    return Shape(
        start=unit * float(medians[0]),
        end=unit * float(medians[-1]),
        best=unit * float(medians.min()),
        noise=unit * noise,
        drop=drop,
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
    correlation = 0.0
    if power > 0:
        correlation = float((spread[1:] * spread[:-1]).sum()) / power
    bounded = min(max(correlation, 0.0), 0.9)
    variance *= (1 + bounded) / (1 - bounded) / 18
    if not score:
        return 0.0
    # The correction for continuity: the score is a whole number, the normal distribution is not.
    return (score - math.copysign(1, score)) / math.sqrt(variance)


class InstabilityEvent(NamedTuple):
    """One instability event, from step `step` to step `last`, over `values` logged values.

    The loss rises above its level by several standard deviations for more than one value. A single
    high value is a bad batch and no event.
    """

    step: float
    """First step above the level."""
    values: int
    """Number of logged values above the level."""
    height: float
    """Highest value minus the level before the event, in standard deviations of the noise."""
    last: float
    """Last step above the level."""


def find_events(
    steps: np.ndarray, values: np.ndarray, sigmas: float, window: int
) -> tuple[list[InstabilityEvent], int, bool]:
    """Finds the instability events of a curve with the spike detector of the policy engine.

    A long curve is reduced to block medians, so that noise of any kind makes no event. An event
    begins at the first alarm of its values, as in a replay.

    Args:
        steps: steps of the values, float64 (n,).
        values: finite losses, float64 (n,).
        sigmas: smallest height of an event, in standard deviations of the noise. It scales the
            threshold of `LossSpikeConfig`.
        window: number of values from which the detector learns the noise of the run.

    Returns:
        The events in order, the number of high values outside events (bad batches), and whether the
        curve ends in the last event.
    """
    default = LossSpikeConfig()
    threshold = default.z_threshold * sigmas / EVENT_SIGMAS
    config = default._replace(z_threshold=threshold, window=window)
    config = map_leaves(_scalar, config)
    reduced = block_medians(values, _MAX_VALUES)
    size = max(1, round(len(values) / max(1, len(reduced))))
    heights, alarms, sustained = _run_detector(config, reduced)
    spans_of_values = alarm_spans(_run_detector(config, values)[1]) if size > 1 else []
    events: list[InstabilityEvent] = []
    high_outside = heights > sigmas
    for first, last in alarm_spans(alarms):
        span = slice(first, last + 1)
        if not sustained[span].any():
            continue
        high_outside[span] = False
        begin, stop = first * size, min((last + 1) * size, len(values))
        if last + 1 == len(reduced):
            stop = len(values)
        for onset, last_of_span in spans_of_values:
            if last_of_span >= begin and onset < stop:
                begin = onset
                break
        height = float(heights[span].max())
        step, last_step = float(steps[begin]), float(steps[stop - 1])
        events.append(InstabilityEvent(step, stop - begin, height, last_step))
    unfinished = bool(events) and events[-1].last == steps[-1]
    return events, int(np.count_nonzero(high_outside)), unfinished


def _run_detector(config: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heights in standard deviations, alarms, and whether a rise is sustained, each (n,)."""
    true, false = np.bool_(True), np.bool_(False)
    blank = CheckedSignals._make([None] * len(CheckedSignals._fields))
    blank = blank._replace(bad_loss=false, bad=false, finite=true, restart=false)

    def judge(state: Any, loss: Any) -> Any:
        state, reading = config.update(state, blank._replace(loss=loss))
        alarm = reading.alarm | reading.sustained  # as in the engine
        return state, (reading.z, alarm, reading.sustained)

    state = map_leaves(_scalar, config.init())
    with np.errstate(all="ignore"):  # as in the engine
        losses, _ = sanitized(values.astype(np.float32), -np.inf, np.inf)
        program = to_program(judge, state, np.float32(0))
        found = []
        for loss in losses:
            state, numbers = program(state, loss)
            found.append(numbers)
    heights, alarms, sustained = np.array(found, np.float64).reshape(-1, 3).T
    return heights / _CHANGE_TO_SIGMA, alarms > 0, sustained > 0


def _scalar(value: Any) -> Any:
    return np.asarray(value)[()]
