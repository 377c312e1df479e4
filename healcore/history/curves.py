"""Reads the curves of a run from its metrics file, and thins them for plots."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.events.log import read_lines
from healcore.events.models import NONFINITE_TEXTS

_MAX_ROWS = 9000
"""Limit of the rows, enough for at least 350 bins with all extremes."""
_CURVES = ("loss", "grad_norm", "threshold", "lr_scale", "lr")


class Curves(NamedTuple):
    """Curves of a run, in recorded order. Every array is (n,), float64 unless it says otherwise.

    A value is NaN if it was not logged, or if it was logged as NaN. `nonfinite` marks the values
    that were logged as NaN. After a rollback `step` becomes smaller, because the steps are recorded
    a second time.
    """

    step: np.ndarray
    """Step of each row, from 0; smaller again after a rollback."""
    loss: np.ndarray
    """Training loss."""
    grad_norm: np.ndarray | None = None
    """Global gradient norm before clipping, or None if no row logs it."""
    threshold: np.ndarray | None = None
    """Limit of the gradient norm."""
    lr_scale: np.ndarray | None = None
    """Multiplier of the learning rate, in (0, 1]."""
    lr: np.ndarray | None = None
    """Learning rate of the program, before the multiplier."""
    nonfinite: np.ndarray | None = None
    """Whether the logged loss or norm is not finite, bool, or None without such marks."""
    rows: int | None = None
    """Number of rows before thinning, or None if no row was dropped."""

    def undone(self) -> np.ndarray:
        """Marks the rows that a later row has replaced: it has the same step or an earlier one.

            step             0  1  2  3  2  3  4
            undone           .  .  x  x  .  .  .

        Returns:
            bool (n,).
        """
        from_here = np.minimum.accumulate(self.step[::-1])[::-1]  # the smallest step from a row on
        return self.step >= np.append(from_here[1:], np.inf)[: len(self.step)]


def thin(curves: Mapping[str, np.ndarray], limit: int) -> np.ndarray:
    """Chooses rows that show the extremes of aligned curves.

    The rows are divided into bins of equal length. For each curve, a bin keeps the rows of the
    smallest, the largest and the first non-finite value. The usual method for plots,
    largest-triangle-three-buckets, may drop a spike of one row.

    Args:
        curves: name -> values, float (n,), with n > 0.
        limit: most rows to keep. One bin has 3 rows of each curve, so that more rows may be kept if
            the limit is below that.

    Returns:
        The places of the kept rows, int64 (m,), increasing. The first and the last row are kept.
    """
    length = len(next(iter(curves.values())))
    if length <= limit:
        return np.arange(length)
    kept = {0, length - 1}
    bins = np.array_split(np.arange(length), max(1, (limit - 2) // (3 * len(curves))))
    for values in curves.values():
        finite = np.isfinite(values)
        low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
        for rows in bins:
            kept |= {rows[low[rows].argmin()], rows[high[rows].argmax()]}
            kept.add(rows[finite[rows].argmin()])
    return np.array(sorted(kept))


def thinned(curves: Curves) -> Curves:
    """Thins the curves of a run for plots, and drops curves without a value.

    Args:
        curves: all rows of a run.

    Returns:
        At most 9,000 rows with all extremes, in the same order. `rows` is the number before.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, values in curves._asdict().items():
        if isinstance(values, np.ndarray) and (name == "loss" or not np.isnan(values).all()):
            arrays[name] = values
    kept = thin(arrays, _MAX_ROWS)
    return Curves(**{name: values[kept] for name, values in arrays.items()}, rows=len(curves.step))


def read_metrics(path: Path, processes: Sequence[str]) -> tuple[Curves, list[str]]:
    """Reads the rows of the processes of a run from its metrics file.

    With several optimizers, only the first optimizer has rows.

    Args:
        path: the metrics file, to which a process may still write.
        processes: ids of the processes, as in the field `run` of a line.

    Returns:
        The curves, and a sentence about each damaged line.

    Raises:
        OSError: the file cannot be read.
    """
    rows = array("d")  # 8 bytes per number: a long run has millions of rows
    damage: list[str] = []
    engine = None
    for line in _rows(path, processes, damage):
        of_line = line.get("engine", "")
        if engine is None:
            engine = of_line
        if of_line == engine:
            nonfinite = any(line.get(name) in NONFINITE_TEXTS for name in ("loss", "grad_norm"))
            rows.extend((line["step"], nonfinite, *(_number(line.get(name)) for name in _CURVES)))
    steps, nonfinite, *values = np.frombuffer(rows).reshape(-1, 2 + len(_CURVES)).T
    curves = dict(zip(_CURVES, values, strict=True))
    # A threshold of 0 means no limit.
    curves["threshold"] = np.where(curves["threshold"] == 0, np.nan, curves["threshold"])
    return Curves(steps, nonfinite=nonfinite.astype(bool), **curves), damage


def _rows(path: Path, processes: Sequence[str], damage: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of some processes in a metrics file. Adds a sentence for each damaged line."""
    for number, line in read_lines(path):
        if isinstance(line, str):
            damage.append(f"line {number}: {line}")
        elif type(step := line.get("step")) is not int or not 0 <= step < 1 << 53:
            damage.append(f"line {number}: not a metrics line, which has a whole number `step`")
        elif line.get("run") in processes:
            yield line


def _number(value: Any) -> float:
    """A value of a line as a number, or NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):  # an int of 400 digits is no float
        return math.nan
