"""Reads the curves of a run from its metrics file, and thins them for plots."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.events.log import parse_line, read_last_lines, read_lines
from healcore.events.models import NONFINITE_TEXTS

_MAX_ROWS = 9000  # at least 450 bins with all extremes
_CURVES = ("loss", "grad_norm", "threshold", "lr_scale", "lr")


class Curves(NamedTuple):
    """Curves of a run, in recorded order. Every array is (n,).

    A value is NaN if it was not logged, or if it was logged as NaN. `nonfinite` marks the latter.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # limit of the gradient norm
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    lr: np.ndarray | None = None  # learning rate of the program, before the multiplier
    attempt: np.ndarray | None = None  # number, or None if all rows are of attempt 0
    nonfinite: np.ndarray | None = None  # bool: the logged loss or norm is not finite
    rows: int | None = None  # rows before thinning, or None if no row was dropped

    def undone(self) -> np.ndarray:
        """Whether a later attempt replaced each row, by starting at or before it; bool (n,)."""
        if self.attempt is None:
            return np.zeros(len(self.step), bool)
        ends = np.flatnonzero(np.diff(self.attempt))  # last row of each attempt except the last
        next_start = np.full(len(self.step), np.inf)
        next_start[ends] = self.step[ends + 1]
        return self.step >= np.minimum.accumulate(next_start[::-1])[::-1]


def thin(index: np.ndarray, curves: Mapping[str, np.ndarray], limit: int) -> np.ndarray:
    """The places of at most `limit` rows that show the extremes of aligned curves.

    Rows are grouped by index, int64 (n,), into bins of equal width, which doubles until the rows
    are few enough. For each curve, a bin keeps the rows of the smallest, the largest and the first
    non-finite value. Largest-triangle-three-buckets may drop a spike of one row.
    """
    places = np.arange(len(index))
    width = 1
    most = max(limit, 3 * max(1, len(curves)) + 2)
    while len(places) > most:
        bins = (index[places] - index[0]) // width
        places = places[_extremes(bins, [curve[places] for curve in curves.values()])]
        width *= 2
    return places


def _extremes(bins: np.ndarray, curves: Iterable[np.ndarray]) -> np.ndarray:
    """Mask, bool (n,), of the first and last row, and each curve's extremes in each bin."""
    keep = np.zeros(len(bins), bool)
    keep[0] = keep[-1] = True
    starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
    bin_of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(bins))))
    for curve in curves:
        finite = np.isfinite(curve)
        for fill, extreme in ((np.inf, np.minimum), (-np.inf, np.maximum)):
            filled = np.where(finite, curve, fill)
            is_extreme = finite & (filled == extreme.reduceat(filled, starts)[bin_of_row])
            keep[_first_per_bin(is_extreme, bin_of_row)] = True
        keep[_first_per_bin(~finite, bin_of_row)] = True
    return keep


def _first_per_bin(selected: np.ndarray, bin_of_row: np.ndarray) -> np.ndarray:
    """The index of the first selected row in each bin with selected rows."""
    rows = np.flatnonzero(selected)
    return rows[np.unique(bin_of_row[rows], return_index=True)[1]]


def thinned(curves: Curves) -> Curves:
    """Thins the curves of a run for plots, and drops curves without a value."""
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    arrays = {name: values for name, values in curves._asdict().items() if values is not None}
    kept = thin(np.arange(len(curves.step)), arrays, _MAX_ROWS)
    few = {
        name: values[kept]
        for name, values in arrays.items()
        if name in ("step", "loss") or not np.isnan(values).all()
    }
    return Curves(**few, rows=len(curves.step))


def read_metrics(path: Path, processes: Sequence[str]) -> tuple[Curves, list[str]]:
    """Reads the rows of the processes of a run, and lists damaged lines. Raises OSError.

    Of several optimizers, only the first has rows. An attempt begins with a process, or with a
    step that does not increase.
    """
    rows = array("d")
    damage = list[str]()
    engine = None
    last = ("", 0)
    attempt = -1
    for number, line in read_lines(path, parse_metrics):
        if isinstance(line, str):
            damage.append(f"line {number}: {line}")
        elif line["run"] in processes:
            engine = line.get("engine", "") if engine is None else engine
            if line.get("engine", "") == engine:
                attempt += line["run"] != last[0] or line["step"] <= last[1]
                last = line["run"], line["step"]
                rows.extend((line["step"], attempt, *_values(line)))
    step, attempts, nonfinite, *curves = np.frombuffer(rows).reshape(-1, 3 + len(_CURVES)).T
    named = dict(zip(_CURVES, curves, strict=True))
    return Curves(step, attempt=attempts, nonfinite=nonfinite.astype(bool), **named), damage


def read_last_rows(path: Path, process: str) -> dict[str, dict[str, Any]]:
    """Engine -> the last row of a process in a metrics file, within its last megabyte.

    The name of the engine is "" for a run with one engine. Raises OSError.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in read_last_lines(path, parse_metrics):
        if row["run"] == process:
            rows[str(row.get("engine", ""))] = row
    return rows


def parse_metrics(line: bytes) -> dict[str, Any] | str:
    """The object in a metrics line, or the reason why the line is not a metrics line."""
    parsed = parse_line(line)
    if isinstance(parsed, str):
        return parsed
    if parsed.get("kind") != "step":
        return 'not a metrics line, which has "kind": "step"'
    step = parsed.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        return f"step is not a whole number from 0 to 2^53: {step!r:.80}"
    return parsed if isinstance(parsed.get("run"), str) else "run is not a string"


def _values(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Whether a logged loss or norm is not finite, then the values of the curves, or NaN."""
    values = {}
    for name in _CURVES:
        value = line.get(name)
        if type(value) in (int, float) or (isinstance(value, str) and value in NONFINITE_TEXTS):
            assert value is not None
            with contextlib.suppress(OverflowError):  # an int of 400 digits
                values[name] = float(value)
    if values.get("threshold") == 0.0:  # 0 means no limit
        del values["threshold"]
    nonfinite = not all(math.isfinite(values.get(name, 0.0)) for name in ("loss", "grad_norm"))
    return nonfinite, *(values.get(name, math.nan) for name in _CURVES)
