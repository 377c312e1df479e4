"""Measures a loss curve: statistics of its values, its ends, its noise and its trend."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

BLOCKS = 1024
MAD_TO_SIGMA = 1.4826
"""Standard deviation of Gaussian noise divided by its median absolute deviation."""
_MEDIAN_TO_MEAN_SIGMA = 1.2533
"""Standard deviation of a median divided by that of a mean, for many values: sqrt(pi / 2)."""
_TREND_POINTS = 64
_ENDS = 0.05
"""Fraction of the curve that counts as its start, and as its end; each has at least 3 values."""


class Curve:
    """One column of a log, and its statistics.

    Attributes:
        step: steps of the logged values, float64 (n,).
        value: logged values, float64 (n,), with NaN and Inf as logged.
        steps: steps of the finite values, float64 (m,).
        finite: finite values, float64 (m,).
        nonfinite: number of NaN and Inf.
        trailing: number of consecutive NaN and Inf at the end.
        variance: variance of the finite values.
        smoothness: 1 - var(dL) / var(L) of finite neighbours, or None for a constant curve.
    """

    def __init__(self, step: np.ndarray, value: np.ndarray) -> None:
        self.step, self.value = step, value
        finite = np.isfinite(value)
        self.steps, self.finite = step[finite], value[finite]
        self.nonfinite = len(value) - len(self.finite)
        self.trailing = int(finite[::-1].argmax()) if finite.any() else len(value)
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.diff(value)
            changes = changes[np.isfinite(changes)]
            self.variance = float(self.finite.var()) if len(self.finite) else 0.0
            change = float(changes.var()) if len(changes) else 0.0
        defined = 0 < self.variance < math.inf
        self.smoothness = 1 - change / self.variance if defined else None


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

    @property
    def relative_regret(self) -> float | None:
        """`regret` divided by start minus best, or None if the curve was never below its start."""
        progress = self.start - self.best
        return self.regret / progress if progress > 0 else None


def measure_shape(curve: np.ndarray) -> Shape:
    """Measures a finite curve, float64 (b,) with b >= 4."""
    # Scaled by the largest value, so that differences of very large values stay finite.
    unit = float(np.abs(curve).max()) or 1.0
    scaled = curve / unit
    width = max(3, round(_ENDS * len(curve)))
    medians = np.median(sliding_window_view(scaled, width), axis=1)
    single = _deviation(scaled)
    # The larger of two estimates: from single values as if they were independent, and from medians
    # of adjacent windows, which include slow drift.
    noise = max(single * _MEDIAN_TO_MEAN_SIGMA / math.sqrt(width), _deviation(medians[::-width]))
    drop = float(scaled[0] - medians[-1])
    return Shape(
        start=unit * float(medians[0]),
        end=unit * float(medians[-1]),
        best=unit * float(medians.min()),
        noise=unit * noise,
        drop=drop / single if single > 0 else 0.0,
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
