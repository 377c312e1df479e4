"""Measures a loss curve of any length in bounded memory."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from healcore.tools.traces import Rows

BLOCKS = 1024
MAD_TO_SIGMA = 1.4826
"""Standard deviation of Gaussian noise divided by its median absolute deviation."""
_MEDIAN_TO_MEAN_SIGMA = 1.2533
"""Standard deviation of a median divided by that of a mean, for many values: sqrt(pi / 2)."""
_TREND_POINTS = 64


class Logged(NamedTuple):
    """Consecutive values of one signal. All arrays have shape (n,)."""

    index: np.ndarray
    """int64: row numbers in the trace."""
    step: np.ndarray
    """float64."""
    value: np.ndarray
    """float64, with NaN and Inf as logged."""


def logged(rows: Rows, signal: str) -> Logged:
    """Selects the logged values of a signal."""
    there = rows.logged.get(signal, np.zeros(len(rows.index), bool))
    value = rows.values[signal][there] if signal in rows.values else np.empty(0)
    return Logged(rows.index[there], rows.step[there], value.astype(np.float64))


class Blocks:
    """Medians of equally long blocks of a curve, fewer than `most` (an even number).

    At first, each value is a block. When `most` blocks are full, each pair of neighbours becomes
    one block with their mean. A long curve has at least `most / 2` blocks.
    """

    def __init__(self, most: int = BLOCKS) -> None:
        self.size = 1
        """Values per block."""
        self._most = most
        self._medians: list[float] = []
        self._waiting = np.empty(0)

    def add(self, values: np.ndarray) -> None:
        """Adds the next finite values, float64 (n,)."""
        waiting = np.concatenate([self._waiting, values])
        while len(waiting) >= self.size:
            take = min(len(waiting) // self.size, self._most - len(self._medians))
            pieces = waiting[: take * self.size].reshape(take, self.size)
            self._medians += np.median(pieces, axis=1).tolist()
            waiting = waiting[take * self.size :]
            if len(self._medians) == self._most:
                pairs = np.asarray(self._medians).reshape(-1, 2)
                self._medians = (pairs[:, 0] + (pairs[:, 1] - pairs[:, 0]) / 2).tolist()
                self.size *= 2
        self._waiting = waiting

    def medians(self) -> np.ndarray:
        """Returns the medians, float64 (b,), with the last block if it is at least half full."""
        whole = np.asarray(self._medians, np.float64)
        if 2 * len(self._waiting) >= self.size:
            return np.append(whole, np.median(self._waiting))
        return whole


class Variance:
    """Variance of a stream, float64 (pairwise update of Chan, Golub and LeVeque)."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, values: np.ndarray) -> None:
        """Adds the next values, float64 (n,)."""
        if not len(values):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            squares = float(((values - mean) ** 2).sum())
            total = self.count + len(values)
            shift = mean - self._mean
            self._squares += squares + shift * shift * self.count * len(values) / total
            self._mean += shift * len(values) / total
        self.count = total

    @property
    def variance(self) -> float:
        """Population variance; 0 for fewer than two values."""
        return self._squares / self.count if self.count > 1 else 0.0


class CurveStatistics:
    """Statistics of a curve, collected in one pass.

    Attributes:
        values: number of values.
        nonfinite: number of NaN and Inf.
        trailing: number of consecutive NaN and Inf at the end.
        level: variance of the finite values.
        change: variance of the differences of finite neighbours.
        best: lowest finite value.
        worst: highest finite value.
    """

    def __init__(self) -> None:
        self.values = self.nonfinite = self.trailing = 0
        self.first_nonfinite: float | None = None
        self.blocks = Blocks()
        self.level = Variance()
        self.change = Variance()
        self.first_step: float | None = None
        self.last_step: float | None = None
        self.best = np.inf
        self.worst = -np.inf
        self.last = np.nan
        self._previous = np.nan

    def add(self, steps: np.ndarray, logged: np.ndarray) -> np.ndarray:
        """Adds the next values, float64 (n,). Returns the finite values, (m,)."""
        if not len(logged):
            return logged
        if self.first_step is None:
            self.first_step = float(steps[0])
        self.last_step = float(steps[-1])
        finite = np.isfinite(logged)
        good, bad = np.flatnonzero(finite), np.flatnonzero(~finite)
        self.values += len(finite)
        self.nonfinite += len(bad)
        if len(bad) and self.first_nonfinite is None:
            self.first_nonfinite = float(steps[bad[0]])
        self.trailing = len(finite) - 1 - int(good[-1]) if len(good) else self.trailing + len(bad)
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.diff(np.concatenate([[self._previous], logged]))
        self.change.add(changes[np.isfinite(changes)])
        self._previous = logged[-1]
        values = logged[finite]
        if len(values):
            self.blocks.add(values)
            self.level.add(values)
            self.best = min(self.best, float(values.min()))
            self.worst = max(self.worst, float(values.max()))
            self.last = float(values[-1])
        return values

    @property
    def finite(self) -> int:
        """Number of finite values."""
        return self.level.count

    @property
    def signed(self) -> bool:
        """Whether 0 lies within the range of the curve."""
        return self.best <= 0 <= self.worst

    @property
    def smoothness(self) -> float | None:
        """1 - var(dL) / var(L), or None for a constant curve."""
        if not self.level.variance > 0 or not np.isfinite(self.level.variance):
            return None
        return 1 - self.change.variance / self.level.variance


class OtherColumns:
    """Statistics of gradient norms, evaluation losses, and losses with NaN for a loss of exactly 0.

    A loss of 0 with a gradient norm above 0 remains 0.
    """

    def __init__(self) -> None:
        self.norms, self.evaluations, self.nonzero = (CurveStatistics() for _ in range(3))

    def add(self, rows: Rows) -> None:
        """Adds the next rows."""
        for name, curve in (("grad_norm", self.norms), ("eval_loss", self.evaluations)):
            curve.add(*logged(rows, name)[1:])
        if "loss" in rows.values:
            loss, norm = rows.values["loss"], rows.values.get("grad_norm", np.zeros(len(rows.step)))
            untrained = (loss == 0) & ~((norm > 0) & (norm < np.inf))
            values = {"loss": np.where(untrained, np.nan, loss)}
            self.nonzero.add(*logged(rows._replace(values=values), "loss")[1:])


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


def measure_shape(curve: np.ndarray, ends: float) -> Shape:
    """Measures a finite curve, float64 (b,) with b >= 4; `ends` is the fraction of one end."""
    # Scaled by the largest value, so that differences of very large values stay finite.
    unit = float(np.abs(curve).max()) or 1.0
    scaled = curve / unit
    width = max(3, round(ends * len(curve)))
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
