"""Reads the curves of a run from its metrics file, and thins them for plots."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.events.json_lines import parse_line, read_lines
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
    attempt: np.ndarray | None = None
    """Number of the attempt, int, or None if all rows are of attempt 0."""
    nonfinite: np.ndarray | None = None
    """Whether the logged loss or norm is not finite, bool, or None without such marks."""
    rows: int | None = None
    """Number of rows before thinning, or None if no row was dropped."""

    def undone(self) -> np.ndarray:
        """Marks the rows that a later attempt has replaced, by starting at or before their step.

            attempt          0  0  0  0  1  1  1
            step             0  1  2  3  2  3  4
            undone           .  .  x  x  .  .  .

        Returns:
            bool (n,).
        """
        if self.attempt is None:
            return np.zeros(len(self.step), bool)
        ends = np.flatnonzero(np.diff(self.attempt))  # last row of each attempt except the last
        next_start = np.full(len(self.step), np.inf)
        next_start[ends] = self.step[ends + 1]
        return self.step >= np.minimum.accumulate(next_start[::-1])[::-1]


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
    bins = max(1, (limit - 2) // (3 * len(curves)))
    for rows in np.array_split(np.arange(length), bins):
        for curve in curves.values():
            values = curve[rows]
            finite = np.isfinite(values)
            if not finite.all():
                kept.add(rows[np.argmin(finite)])
            if finite.any():
                kept.add(rows[np.argmin(np.where(finite, values, np.inf))])
                kept.add(rows[np.argmax(np.where(finite, values, -np.inf))])
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
        if values is not None and (name in ("step", "loss") or not np.isnan(values).all()):
            arrays[name] = values
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    kept = thin(arrays, _MAX_ROWS)
    thinned_arrays = {name: values[kept] for name, values in arrays.items()}
    return Curves(**thinned_arrays, rows=len(curves.step))


def read_metrics(path: Path, processes: Sequence[str]) -> tuple[Curves, list[str]]:
    """Reads the rows of the processes of a run from its metrics file.

    With several optimizers, only the first optimizer has rows. An attempt begins with a process, or
    with a step that does not increase.

    Args:
        path: the metrics file, to which a process may still write.
        processes: ids of the processes, as in the field `run` of a line.

    Returns:
        The curves, with attempts from 0, and a sentence about each damaged line.

    Raises:
        OSError: the file cannot be read.
    """
    rows = array("d")  # 8 bytes per number: a long run has millions of rows
    damage: list[str] = []
    attempt, process, step, engine = -1, "", 0, None
    for line in _rows(path, processes, damage):
        engine = line.get("engine", "") if engine is None else engine
        if line.get("engine", "") != engine:
            continue
        attempt += line["run"] != process or line["step"] <= step
        process, step = line["run"], line["step"]
        rows.extend((step, attempt, *_values(line)))
    table = np.frombuffer(rows).reshape(-1, 3 + len(_CURVES))
    steps, attempts, nonfinite, *curves = table.T
    named = dict(zip(_CURVES, curves, strict=True))
    return Curves(steps, attempt=attempts, nonfinite=nonfinite.astype(bool), **named), damage


def last_rows(path: Path, process: str) -> dict[str, dict[str, Any]]:
    """Reads the last row of each engine of a process from the metrics file of a killed run.

    Args:
        path: the metrics file.
        process: id of the killed process.

    Returns:
        Engine -> its row; "" is the name of the only engine.

    Raises:
        OSError: the file cannot be read.
    """
    return {str(row.get("engine", "")): row for row in _rows(path, [process], [])}


def _rows(path: Path, processes: Sequence[str], damage: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of some processes in a metrics file. Adds a sentence for each damaged line."""
    for number, line in read_lines(path, _parse_row):
        if isinstance(line, str):
            damage.append(f"line {number}: {line}")
        elif line["run"] in processes:
            yield line


def _parse_row(line: bytes) -> dict[str, Any] | str:
    """Parses a line of a metrics file: the row, or the reason why the line is none."""
    parsed = parse_line(line)
    if isinstance(parsed, str):
        return parsed
    step = parsed.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53 or not isinstance(parsed.get("run"), str):
        return "not a metrics line, which has a whole number `step` and a text `run`"
    return parsed


def _values(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Whether a logged loss or norm is not finite, then the values of the curves, or NaN."""
    values: list[float] = []
    for name in _CURVES:
        value: Any = line.get(name)
        # A bool is an int too, but no number here; an int of 400 digits is no float.
        known = (type(value) in (int, float) and abs(value) < 1e300) or value in NONFINITE_TEXTS
        values.append(float(value) if known else math.nan)
    nonfinite = any(line.get(name) in NONFINITE_TEXTS for name in ("loss", "grad_norm"))
    if values[2] == 0:  # a threshold of 0 means no limit
        values[2] = math.nan
    return nonfinite, *values
