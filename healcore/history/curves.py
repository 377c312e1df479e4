"""Thins the curves of a run for plots, finds gaps, and locates the rows of incidents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.history.incident import Counts, Incident
from healcore.history.metrics import MetricRows
from healcore.history.run import Run, RunAttempt

MAX_ROWS = 9000  # at least 450 bins with all extremes

_CHUNK = 65_536  # rows thinned at a time
_MIN_MISSING = 10  # missing rows of a gap; logs may skip single rows
_MAX_GAPS = 20  # a log with more gaps has varying strides


class Gap(NamedTuple):
    """Missing steps between two rows."""

    row: int  # index of the first row after the gap
    low: float  # step of the last row before the gap
    high: float  # step of the first row after the gap
    missing: float  # number of missing rows
    stride: float  # usual number of steps between rows
    exact: bool  # no row lies between `low` and `high`; False if thinning may have dropped rows


class Curves(NamedTuple):
    """Thinned curves for plots, in recorded order. Every array is (n,).

    A value is NaN if it was not logged, or if it was logged as NaN. `nonfinite` marks the latter.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # limit of the gradient norm
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    index: np.ndarray | None = None  # int64, row numbers in the log, or None for 0, 1, 2, ...
    attempt: np.ndarray | None = None  # int64, or None if all rows are of attempt 0
    nonfinite: np.ndarray | None = None  # bool: the logged loss or norm is not finite
    rows: int | None = None  # rows before thinning, or None if no row was dropped
    isolated: bool = False  # the rows are single steps, drawn as points

    def undone(self) -> np.ndarray:
        """Returns bool (n,): rows that a later attempt replaced, see `undone_rows`."""
        if self.attempt is None:
            return np.zeros(len(self.step), bool)
        return undone_rows(self.step, self.attempt)

    def gaps(self) -> list[Gap]:
        """Returns the gaps, for example after a kill, or an empty list for irregular curves."""
        if self.isolated or len(self.step) < 3:
            return []
        index = np.arange(len(self.step)) if self.index is None else self.index
        # Log rows from each row to the next, more than 1 where thinning dropped rows.
        rows, steps = np.diff(index), np.diff(self.step)
        forward = (steps > 0) & (rows > 0) & np.isfinite(steps)
        if not forward.any():
            return []
        stride = float(np.median(steps[forward] / rows[forward]))
        missing = np.where(forward, steps / stride - rows, 0.0)
        gaps = np.flatnonzero(missing >= _MIN_MISSING)
        if len(gaps) > min(_MAX_GAPS, len(steps) / 5):
            return []
        return [
            Gap(
                row=i + 1,
                low=float(self.step[i]),
                high=float(self.step[i + 1]),
                missing=float(missing[i]),
                stride=stride,
                exact=bool(rows[i] == 1),
            )
            for i in gaps.tolist()
        ]


def undone_rows(step: np.ndarray, attempt: np.ndarray) -> np.ndarray:
    """Returns bool (n,): rows that a later attempt replaced by starting at or before their step."""
    ends = np.flatnonzero(np.diff(attempt))  # last row of each attempt except the last
    next_start = np.full(len(step), np.inf)
    next_start[ends] = step[ends + 1]
    return step >= np.minimum.accumulate(next_start[::-1])[::-1]


class Envelope:
    """Thins aligned curves to at most `limit` rows, in a streaming fashion.

    Rows are grouped by index into bins of equal width. For each curve, a bin keeps the rows of the
    smallest, the largest and the first non-finite value. If there are too many bins, the width
    doubles. Bins are aligned, so the result does not depend on the chunks. The first and the last
    row are kept. Largest-triangle-three-buckets, the usual method, may drop a spike of one row.
    """

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._width = 1
        self._chunks: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._count = 0
        self._origin: int | None = None
        self._names: list[str] = []

    def add(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Adds rows. `index`, int64 (n,), increases over all calls. Missing curves are NaN."""
        if not len(index):
            return
        if self._origin is None:
            self._origin = int(index[0])
        self._names += [name for name in values if name not in self._names]
        self._chunks.append((np.asarray(index), {k: np.asarray(v) for k, v in values.items()}))
        self._count += len(index)
        # Thinning only above a multiple of the limit costs amortized O(1) per row.
        if self._count > 4 * self._limit + 4096:
            self._thin(2 * self._limit)

    def thinned(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the index, int64 (m,), and the curves, float32 (m,) each, of the kept rows."""
        if not self._chunks:
            return np.empty(0, np.int64), {}
        self._thin(self._limit)
        index, values = self._chunks[0]
        return index.copy(), {name: curve.copy() for name, curve in values.items()}

    def _thin(self, most: int) -> None:
        index, values = self._joined()
        floor = 3 * max(1, len(self._names)) + 2
        while len(index) > max(most, floor):
            keep = self._extremes(index, values)
            index = index[keep]
            values = {name: curve[keep] for name, curve in values.items()}
            if len(index) > max(most, floor):
                self._width *= 2
        self._chunks = [(index, values)]
        self._count = len(index)

    def _joined(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        index = np.concatenate([index for index, _ in self._chunks])
        values = {
            name: np.concatenate(
                [
                    curves.get(name, np.full(len(index), np.nan, np.float32)).astype(np.float32)
                    for index, curves in self._chunks
                ]
            )
            for name in self._names
        }
        return index, values

    def _extremes(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns bool (n,): the first and last row, and each curve's extremes in each bin."""
        keep = np.zeros(len(index), bool)
        keep[0] = keep[-1] = True
        bins = (index - self._origin) // self._width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        bin_of_row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(index))))
        for curve in values.values():
            finite = np.isfinite(curve)
            for fill, extreme in ((np.inf, np.minimum), (-np.inf, np.maximum)):
                filled = np.where(finite, curve, fill)
                is_extreme = finite & (filled == extreme.reduceat(filled, starts)[bin_of_row])
                keep[_first_per_bin(is_extreme, bin_of_row)] = True
            keep[_first_per_bin(~finite, bin_of_row)] = True
        return keep


def _first_per_bin(selected: np.ndarray, bin_of_row: np.ndarray) -> np.ndarray:
    """Returns the index of the first selected row in each bin that has one."""
    rows = np.flatnonzero(selected)
    return rows[np.unique(bin_of_row[rows], return_index=True)[1]]


class RunCurves(NamedTuple):
    """Curves, incidents and counts of a run."""

    curves: Curves
    incidents: tuple[Incident, ...]  # with row indices
    attempts: tuple[RunAttempt, ...]
    counts: Counts | None = None  # counts of steps, or None if the log does not record alarms
    notes: tuple[str, ...] = ()
    unreadable: str = ""  # why the metrics could not be read, or an empty string


def compute_curves(run: Run, rows: MetricRows) -> RunCurves:
    """Thins the rows of a run for plots, locates the rows of its incidents, and counts steps."""
    incidents = [_add_unreported(each, run.incidents, rows) for each in run.incidents]
    ends = np.array([step for each in incidents for step in (each.onset_step, each.step)])
    end_rows = np.flatnonzero(np.isin(rows.step, ends)).tolist()
    row_of = {(int(rows.attempt[row]), float(rows.step[row])): row for row in end_rows}
    located = tuple(
        dataclasses.replace(
            incident,
            onset=row_of.get((incident.attempt, incident.onset_step), -1),
            index=row_of.get((incident.attempt, incident.step), -1),
        )
        for incident in incidents
    )
    return RunCurves(_thin(rows), located, tuple(run.attempts), _count_steps(rows))


def _add_unreported(incident: Incident, others: Sequence[Incident], rows: MetricRows) -> Incident:
    """Adds alarms without an event, which are in the rows up to the next incident."""
    if rows.flags is None or not incident.capped:
        return incident
    onsets = (each.onset_step for each in others if each.attempt == incident.attempt)
    end = min((onset for onset in onsets if onset > incident.onset_step), default=np.inf)
    alarm, skip, _ = rows.flags
    inside = (rows.step >= incident.onset_step) & (rows.step < end)
    alarms = (rows.attempt == incident.attempt) & inside & alarm
    last = rows.step[alarms].max(initial=incident.step)
    skipped = int(np.count_nonzero(alarms & skip))
    return dataclasses.replace(
        incident, skipped=max(incident.skipped, skipped), step=float(last), capped=False
    )


def _count_steps(rows: MetricRows) -> Counts | None:
    """Counts steps, which for thinned metrics is an estimate."""
    if rows.flags is None:
        return None

    def steps(selected: np.ndarray) -> int:
        return int(rows.every[selected].sum())

    alarm, skip, clip = rows.flags
    return Counts(
        alarms=steps(alarm),
        skips=steps(skip),
        undone_skips=steps(skip & undone_rows(rows.step, rows.attempt)),
        clips=steps(clip & ~skip),
    )


def _thin(rows: MetricRows) -> Curves:
    envelope = Envelope(limit=MAX_ROWS)
    # As a curve, `attempt` keeps the first row of each attempt, an extreme of its bin.
    aligned = {**rows.values, "attempt": rows.attempt, "nonfinite": rows.nonfinite}
    for first in range(0, len(rows.step), _CHUNK):
        part = slice(first, first + _CHUNK)
        index = np.arange(first, min(first + _CHUNK, len(rows.step)))
        envelope.add(index, {name: values[part] for name, values in aligned.items()})
    index, _ = envelope.thinned()
    curve = {
        name: None if np.isnan(values).all() else values[index]
        for name, values in rows.values.items()
    }
    return Curves(
        step=rows.step[index],
        loss=rows.values["loss"][index],
        grad_norm=curve["grad_norm"],
        threshold=curve["threshold"],
        lr_scale=curve["lr_scale"],
        index=index,
        attempt=rows.attempt[index],
        nonfinite=rows.nonfinite[index],
        rows=len(rows.step),
    )
