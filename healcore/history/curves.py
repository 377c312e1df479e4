"""Reads the curves of a run from its metrics file, and thins them for plots."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.events.json_lines import parse_line, read_last_lines, read_lines
from healcore.events.models import NONFINITE_TEXTS

_MAX_ROWS = 9000
"""Limit of the rows, enough for at least 450 bins with all extremes."""
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
    after_gap: np.ndarray | None = None
    """Whether the rows of the steps before were lost with their process, bool, or None without such
    marks."""

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


def thin(index: np.ndarray, curves: Mapping[str, np.ndarray], limit: int) -> np.ndarray:
    """Chooses rows that show the extremes of aligned curves.

    Rows are grouped by index into bins of equal width, which doubles until the rows are few enough.
    For each curve, a bin keeps the rows of the smallest, the largest and the first non-finite
    value. The usual method for plots, largest-triangle-three-buckets, may drop a spike of one row.

    Args:
        index: int64 (n,), not decreasing: the place of each row on the axis of the plot.
        curves: name -> values, float (n,).
        limit: most rows to keep. One bin has 3 rows of each curve, so that more rows may be kept if
            the limit is below that.

    Returns:
        The places of the kept rows, int64 (m,), increasing. The first and the last row are kept.
    """
    places = np.arange(len(index))
    width = 1
    one_bin = 3 * max(1, len(curves)) + 2
    while len(places) > max(limit, one_bin):
        bins = (index[places] - index[0]) // width
        kept = [curve[places] for curve in curves.values()]
        places = places[_extremes(bins, kept)]
        width *= 2
    return places


def _extremes(bins: np.ndarray, curves: Iterable[np.ndarray]) -> np.ndarray:
    """Mask, bool (n,), of the first and last row, and each curve's extremes in each bin."""
    keep = np.zeros(len(bins), bool)
    keep[[0, -1]] = True
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
    """Thins the curves of a run for plots, and drops curves without a value.

    Args:
        curves: all rows of a run.

    Returns:
        At most 9,000 rows with all extremes, in the same order. `rows` is the number before.
    """
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    arrays = {name: values for name, values in curves._asdict().items() if values is not None}
    kept = thin(np.arange(len(curves.step)), arrays, _MAX_ROWS)
    thinned_arrays = {}
    for name, values in arrays.items():
        if name in ("step", "loss") or not np.isnan(values).all():
            thinned_arrays[name] = values[kept]
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
    engine = None
    last_process = ""
    last_step = 0
    last_every = 1
    attempt = -1
    for number, line in read_lines(path, parse_metrics):
        if isinstance(line, str):
            damage.append(f"line {number}: {line}")
            continue
        process = line["run"]
        step = line["step"]
        if process not in processes:
            continue
        if engine is None:
            engine = line.get("engine", "")
        if line.get("engine", "") != engine:
            continue
        every = line.get("every", 1)
        if type(every) is not int:
            every = 1
        if process != last_process or step <= last_step:
            attempt += 1
        # A process that was killed may have lost its last rows, although a later save was written.
        after_gap = last_process not in ("", process) and step > last_step + max(every, last_every)
        last_process = process
        last_step = step
        last_every = every
        rows.extend((step, attempt, after_gap, *_values(line)))
    table = np.frombuffer(rows).reshape(-1, 4 + len(_CURVES))
    steps, attempts, gaps, nonfinite, *curves = table.T
    named = dict(zip(_CURVES, curves, strict=True))
    marks = {"nonfinite": nonfinite.astype(bool), "after_gap": gaps.astype(bool)}
    return Curves(steps, attempt=attempts, **marks, **named), damage


def read_last_rows(path: Path, process: str) -> dict[str, dict[str, Any]]:
    """Reads the last row of each engine of a process, within the last megabyte of the file.

    Args:
        path: the metrics file.
        process: id of the process, as in the field `run` of a line.

    Returns:
        Name of the engine, "" for a run with one engine -> the fields of its last row.

    Raises:
        OSError: the file cannot be read.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in read_last_lines(path, parse_metrics):
        if row["run"] == process:
            rows[str(row.get("engine", ""))] = row
    return rows


def count_changes(path: Path, processes: Sequence[str]) -> Counter[str]:
    """Counts the changes of a run that its metrics file shows.

    Args:
        path: the metrics file.
        processes: ids of the processes of the run.

    Returns:
        "skips" and "clips" -> number of steps, also of steps that a rollback has undone. Steps that
        a restart repeats count once. A thinned file does not show each clipped step.

    Raises:
        OSError: the file cannot be read.
    """
    changes: list[tuple[int, int, str]] = []  # number of the attempt, step, name
    attempt, last_process, last_step = 0, "", 0
    for _, row in read_lines(path, parse_metrics):
        if isinstance(row, str) or row["run"] not in processes:
            continue
        step = row["step"]
        if row["run"] != last_process:
            changes = [each for each in changes if each[0] < attempt or each[1] < step]
        elif step < last_step:  # after a rollback
            attempt += 1
        last_process, last_step = row["run"], step
        if row.get("skip") is True:
            changes.append((attempt, step, "skips"))
        elif row.get("grad_scale", 1) != 1:
            changes.append((attempt, step, "clips"))
    return Counter(name for _, _, name in changes)


def parse_metrics(line: bytes) -> dict[str, Any] | str:
    """Parses a line of a metrics file.

    Args:
        line: the bytes of the line, with or without its newline.

    Returns:
        The object, in which `kind`, `step` and `run` have the right types, or the reason why the
        line is not a metrics line.
    """
    parsed = parse_line(line)
    if isinstance(parsed, str):
        return parsed
    if parsed.get("kind") != "step":
        return 'not a metrics line, which has "kind": "step"'
    step = parsed.get("step")
    if type(step) is not int or not 0 <= step < 1 << 53:
        return f"step is not a whole number from 0 to 2^53: {step!r:.80}"
    if not isinstance(parsed.get("run"), str):
        return "run is not a string"
    return parsed


def _values(line: Mapping[str, Any]) -> tuple[float, ...]:
    """Whether a logged loss or norm is not finite, then the values of the curves, or NaN."""
    values = dict.fromkeys(_CURVES, math.nan)
    nonfinite = False
    for name in _CURVES:
        value = line.get(name)
        if value is None:
            continue
        is_number = type(value) in (int, float)  # a bool is an int too, but no number here
        if not is_number and value not in NONFINITE_TEXTS:
            continue
        try:
            values[name] = float(value)
        except OverflowError:  # an int of 400 digits
            continue
        if name in ("loss", "grad_norm") and not math.isfinite(values[name]):
            nonfinite = True
    if values["threshold"] == 0.0:  # 0 means no limit
        values["threshold"] = math.nan
    return nonfinite, *values.values()
