"""A curve of any length in bounded memory: blocks, variances, and where it was not finite."""

from __future__ import annotations

import numpy as np

from healcore.tools.probe.loss.logged import Logged

BLOCKS = 1024


class Blocks:
    """Medians of equally long pieces of a curve: at most 1024, and at least half as many.

    While there are fewer values than that, each is its own block. Whenever there are 1024, each two
    neighbours become one, which is then their mean.

    Args:
        most: another number than 1024, even.
    """

    def __init__(self, most: int = BLOCKS) -> None:
        self.size = 1
        """Values in each."""
        self._most = most
        self._medians: list[float] = []
        self._waiting = np.empty(0)

    def add(self, values: np.ndarray) -> None:
        """Takes the next finite values, float64 (n,)."""
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
        """float64 (b,). A last block that is not full counts if at least half of it is there."""
        whole = np.asarray(self._medians, np.float64)
        if 2 * len(self._waiting) >= self.size:
            return np.append(whole, np.median(self._waiting))
        return whole


class Variance:
    """Mean and variance of a stream (Chan, Golub and LeVeque's pairwise update), in float64."""

    def __init__(self) -> None:
        self.count = 0
        self._mean = 0.0
        self._squares = 0.0

    def add(self, values: np.ndarray) -> None:
        """Takes the next values, float64 (n,)."""
        if not len(values):
            return
        with np.errstate(over="ignore", invalid="ignore"):
            mean = float(values.mean())
            squares = float(((values - mean) ** 2).sum())
            total = self.count + len(values)
            apart = mean - self._mean
            self._squares += squares + apart * apart * self.count * len(values) / total
            self._mean += apart * len(values) / total
        self.count = total

    @property
    def variance(self) -> float:
        """Population variance, 0 of fewer than two values."""
        return self._squares / self.count if self.count > 1 else 0.0


class Finiteness:
    """How many values were NaN or Inf, and where."""

    def __init__(self) -> None:
        self.values = 0
        self.nonfinite = 0
        self.first_step: float | None = None
        """Of the first NaN or Inf."""
        self.trailing = 0
        """How many the curve ends with."""

    def add(self, chunk: Logged) -> np.ndarray:
        """Takes the next values; returns which are finite, bool (n,)."""
        finite = np.isfinite(chunk.value)
        bad = np.flatnonzero(~finite)
        self.values += len(finite)
        self.nonfinite += len(bad)
        if len(bad) and self.first_step is None:
            self.first_step = float(chunk.step[bad[0]])
        good = np.flatnonzero(finite)
        self.trailing = len(finite) - 1 - int(good[-1]) if len(good) else self.trailing + len(bad)
        return finite


class Reduction:
    """All of it together.

    Attributes:
        finiteness: where the curve was not finite.
        blocks: its shape.
        level: variance of the values.
        change: variance of the differences of neighbours; none over a gap of NaN.
        first_step: of the first value, None before there is one.
        last_step: of the last.
        best: the lowest finite value.
        worst: the highest.
        last: the last finite value.
    """

    def __init__(self) -> None:
        self.finiteness = Finiteness()
        self.blocks = Blocks()
        self.level = Variance()
        self.change = Variance()
        self.first_step: float | None = None
        self.last_step: float | None = None
        self.best = np.inf
        self.worst = -np.inf
        self.last = np.nan
        self._before = np.nan

    def add(self, chunk: Logged) -> np.ndarray:
        """Takes the next values of the curve; returns the finite ones, float64 (m,)."""
        if not len(chunk.value):
            return chunk.value
        if self.first_step is None:
            self.first_step = float(chunk.step[0])
        self.last_step = float(chunk.step[-1])
        finite = self.finiteness.add(chunk)
        values = chunk.value[finite]
        with np.errstate(invalid="ignore", over="ignore"):
            changes = np.diff(np.concatenate([[self._before], chunk.value]))
        self.change.add(changes[np.isfinite(changes)])
        self._before = chunk.value[-1]
        if len(values):
            self.blocks.add(values)
            self.level.add(values)
            self.best = min(self.best, float(values.min()))
            self.worst = max(self.worst, float(values.max()))
            self.last = float(values[-1])
        return values

    @property
    def finite(self) -> int:
        """How many values were finite."""
        return self.level.count

    @property
    def signed(self) -> bool:
        """Whether it takes values on both sides of 0, or 0 itself."""
        return self.best <= 0 <= self.worst

    @property
    def smoothness(self) -> float | None:
        """1 - var(dL) / var(L); None of a curve that does not change."""
        if not self.level.variance > 0 or not np.isfinite(self.level.variance):
            return None
        return 1 - self.change.variance / self.level.variance
