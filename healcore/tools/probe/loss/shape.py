"""Where a curve begins, ends and was best, and whether it rises, each against its own noise."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_MEDIAN = 1.4826
"""Median absolute deviation -> standard deviation of Gaussian noise."""
_OF_MEDIAN = 1.2533
"""Standard deviation of a median of many values, in those of their mean: sqrt(pi / 2)."""
_TREND_POINTS = 64


class Shape(NamedTuple):
    """Of a curve where lower is better."""

    start: float
    """Median of the first values."""
    end: float
    best: float
    """Lowest of the running medians, each over as many values as `end`."""
    noise: float
    """Standard deviation of such a median that the noise of the curve leaves."""
    drop: float
    """How far the first value is above `end`, in standard deviations of a single value. In a log
    with few values all that is learnt quickly shows in the first one only."""
    trend: float
    """Mann and Kendall's statistic in standard deviations; positive where the curve rises."""

    @property
    def regret(self) -> float:
        """How far the end is above the best."""
        return max(0.0, self.end - self.best)

    @property
    def relative_regret(self) -> float | None:
        """`regret` as a part of the way from the start to the best; None if there was no way."""
        way = self.start - self.best
        return self.regret / way if way > 0 else None


def shape(curve: np.ndarray, ends: float) -> Shape:
    """Measures a curve.

    Args:
        curve: float64 (b,), b >= 4, finite; lower is better.
        ends: how much of it one end is.
    """
    # In units of the largest value, so that differences of very large ones stay finite.
    unit = float(np.abs(curve).max()) or 1.0
    scaled = curve / unit
    width = max(3, round(ends * len(curve)))
    medians = np.median(sliding_window_view(scaled, width), axis=1)
    single = deviation(scaled)
    # The larger of two: from single values, as if they were independent; and from the medians of
    # neighbouring windows, which knows how far a curve wanders, if there are a few windows.
    noise = max(single * _OF_MEDIAN / math.sqrt(width), deviation(medians[::-width]))
    drop = float(scaled[0] - medians[-1])
    return Shape(
        start=unit * float(medians[0]),
        end=unit * float(medians[-1]),
        best=unit * float(medians.min()),
        noise=unit * noise,
        drop=drop / single if single > 0 else 0.0,
        trend=trend(scaled),
    )


def deviation(curve: np.ndarray) -> float:
    """Standard deviation of the noise of a curve, robustly and whatever its slope.

    From second differences, in which a straight line is gone and white noise six times as large.
    Enlarged for few values, whose median may be small by chance.

    Args:
        curve: float64 (b,); of fewer than 4 the answer is 0.
    """
    if len(curve) < 4:
        return 0.0
    bends = np.abs(np.diff(curve, 2))
    return _MEDIAN * float(np.median(bends)) / math.sqrt(6) * (1 + 4 / len(bends))


def trend(curve: np.ndarray) -> float:
    """Mann and Kendall's test for a trend, on at most 64 means of neighbours.

    The variance is enlarged for what is left of autocorrelation around the median of pairwise
    slopes (Theil and Sen), as Hamed and Rao do: without that a wandering curve has a trend as soon
    as it is long enough.

    Args:
        curve: float64 (b,), finite.
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
    rest = points - float(np.median(rises / (later - earlier))) * np.arange(n)
    spread = rest - rest.mean()
    power = float((spread**2).sum())
    correlation = float((spread[1:] * spread[:-1]).sum()) / power if power > 0 else 0.0
    held = min(max(correlation, 0.0), 0.9)
    variance *= (1 + held) / (1 - held) / 18
    return (score - math.copysign(1, score) if score else 0.0) / math.sqrt(variance)
