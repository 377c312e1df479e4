"""Makes the curves of a run: thinned for plots, with gaps, and with the rows of its incidents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.history.incident import Counts, Incident
from healcore.history.metrics import MetricRows
from healcore.history.run import Run, RunAttempt

MAX_ROWS = 9000  # about 450 bins or more, with all their extremes

_CHUNK = 65_536  # rows that are thinned at a time
_MIN_MISSING = 10  # missing rows that make a gap; a log may skip single rows
_MAX_GAPS = 20  # more gaps: the log has several strides


class Gap(NamedTuple):
    """Missing steps between two rows."""

    row: int  # index of the first row after the gap
    low: float  # step of the last row before the gap
    high: float  # step of the first row after the gap
    missing: float  # number of missing rows
    stride: float  # usual number of steps between rows
    exact: bool  # the log has no row between `low` and `high`; False where curves are thinned


class Curves(NamedTuple):
    """Curves for plots, thinned, in recorded order; every array is (n,).

    NaN stands for a value that was not logged, and for a logged NaN; `nonfinite` marks the latter.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # limit of the gradient norm
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    index: np.ndarray | None = None  # int64, row numbers in the log, or None for 0, 1, 2, ...
    attempt: np.ndarray | None = None  # int64, or None if all rows are of attempt 0
    nonfinite: np.ndarray | None = None  # bool: a logged loss or norm is not finite
    rows: int | None = None  # rows before thinning, or None if no row was dropped
    isolated: bool = False  # single steps: drawn as points, without a line

    def undone(self) -> np.ndarray:
        """Bool (n,): rows replaced by a later attempt, which began at or before their step."""
        if self.attempt is None:
            return np.zeros(len(self.step), bool)
        return undone_rows(self.step, self.attempt)

    def gaps(self) -> list[Gap]:
        """The gaps of curves that have nearly all steps. A kill loses half a second of metrics."""
        if self.isolated or len(self.step) < 3:
            return []
        index = np.arange(len(self.step)) if self.index is None else self.index
        # Log rows from one kept row to the next; more than 1 in thinned curves.
        rows, steps = np.diff(index), np.diff(self.step)
        onward = (steps > 0) & (rows > 0) & np.isfinite(steps)
        if not onward.any():
            return []
        stride = float(np.median(steps[onward] / rows[onward]))
        missing = np.where(onward, steps / stride - rows, 0.0)
        found = np.flatnonzero(missing >= _MIN_MISSING)
        if len(found) > min(_MAX_GAPS, len(steps) / 5):
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
            for i in found.tolist()
        ]


def undone_rows(step: np.ndarray, attempt: np.ndarray) -> np.ndarray:
    """Bool (n,): rows replaced by a later attempt, which began at or before their step."""
    begins = np.flatnonzero(np.diff(attempt))  # last row of each attempt but the last
    first = np.full(len(step), np.inf)
    first[begins] = step[begins + 1]
    return step >= np.minimum.accumulate(first[::-1])[::-1]


class Envelope:
    """Streaming down-sampling of aligned curves for plots, to at most `limit` rows.

    Rows are put into bins of equal width (of index). For each curve, a bin keeps the rows of the
    smallest, the largest and the first non-finite value. With too many bins, the width doubles.
    Bins are aligned, so the result does not depend on the chunks. The first and last row are kept.

    Largest-triangle-three-buckets was rejected: it may drop a spike of one row.
    """

    def __init__(self, limit: int = 2000) -> None:
        self._limit = limit
        self._width = 1
        self._held: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self._count = 0
        self._origin: int | None = None
        self._names: list[str] = []

    def add(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> None:
        """Adds rows: `index` (n,) int64 increases from call to call; missing curves are NaN."""
        if not len(index):
            return
        if self._origin is None:
            self._origin = int(index[0])
        self._names += [name for name in values if name not in self._names]
        self._held.append((np.asarray(index), {k: np.asarray(v) for k, v in values.items()}))
        self._count += len(index)
        # Only after several times the limit: O(1) per row, amortised.
        if self._count > 4 * self._limit + 4096:
            self._thin(2 * self._limit)

    def kept(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Returns the index (m,) of the kept rows, and the curves, (m,) each."""
        if not self._held:
            return np.empty(0, np.int64), {}
        self._thin(self._limit)
        index, values = self._held[0]
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
        self._held = [(index, values)]
        self._count = len(index)

    def _joined(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        index = np.concatenate([held for held, _ in self._held])
        values = {
            name: np.concatenate(
                [
                    held.get(name, np.full(len(at), np.nan, np.float32)).astype(np.float32)
                    for at, held in self._held
                ]
            )
            for name in self._names
        }
        return index, values

    def _extremes(self, index: np.ndarray, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Bool (n,): the first and last row, and the extremes of each curve in each bin."""
        keep = np.zeros(len(index), bool)
        keep[0] = keep[-1] = True
        bins = (index - self._origin) // self._width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        of_bin = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(index))))
        for curve in values.values():
            finite = np.isfinite(curve)
            for filled, best in ((np.inf, np.minimum), (-np.inf, np.maximum)):
                safe = np.where(finite, curve, filled)
                hit = finite & (safe == best.reduceat(safe, starts)[of_bin])
                keep[_first_of_each(hit, of_bin)] = True
            keep[_first_of_each(~finite, of_bin)] = True
        return keep


def _first_of_each(hit: np.ndarray, of_bin: np.ndarray) -> np.ndarray:
    at = np.flatnonzero(hit)
    return at[np.unique(of_bin[at], return_index=True)[1]]


class RunCurves(NamedTuple):
    """The curves of a run, and what is computed from its rows."""

    curves: Curves
    incidents: tuple[Incident, ...]  # with `onset` and `index`
    attempts: tuple[RunAttempt, ...]
    counts: Counts | None = None  # counts of steps, or None if the log has no alarms
    notes: tuple[str, ...] = ()
    unreadable: str = ""  # why the metrics could not be read, or an empty string


def curves_of(run: Run, rows: MetricRows) -> RunCurves:
    """Thins the rows of a run for plots, finds the rows of its incidents, and counts."""
    incidents = [_completed(each, run.incidents, rows) for each in run.incidents]
    ends = np.array([at for each in incidents for at in (each.onset_step, each.step)])
    near = np.flatnonzero(np.isin(rows.step, ends)).tolist()
    found = {(int(rows.attempt[row]), float(rows.step[row])): row for row in near}
    placed = tuple(
        dataclasses.replace(
            each,
            onset=found.get((each.attempt, each.onset_step), -1),
            index=found.get((each.attempt, each.step), -1),
        )
        for each in incidents
    )
    return RunCurves(_thinned(rows), placed, tuple(run.attempts), _counts(rows))


def _completed(incident: Incident, others: Sequence[Incident], rows: MetricRows) -> Incident:
    """The incident, including alarms up to the next incident that have no event."""
    if rows.flags is None or not incident.capped:
        return incident
    onsets = (each.onset_step for each in others if each.attempt == incident.attempt)
    end = min((onset for onset in onsets if onset > incident.onset_step), default=np.inf)
    alarm, skip, _ = rows.flags
    own = (rows.attempt == incident.attempt) & (rows.step >= incident.onset_step)
    last = rows.step[own & (rows.step < end) & alarm].max(initial=incident.step)
    skipped = int(np.count_nonzero(own & (rows.step < end) & alarm & skip))
    return dataclasses.replace(
        incident, skipped=max(incident.skipped, skipped), step=float(last), capped=False
    )


def _counts(rows: MetricRows) -> Counts | None:
    """Counts of steps; for thinned metrics they are estimates."""
    if rows.flags is None:
        return None

    def steps(which: np.ndarray) -> int:
        return int(rows.every[which].sum())

    alarm, skip, clip = rows.flags
    return Counts(
        alarms=steps(alarm),
        skips=steps(skip),
        undone_skips=steps(skip & undone_rows(rows.step, rows.attempt)),
        clips=steps(clip & ~skip),
    )


def _thinned(rows: MetricRows) -> Curves:
    envelope = Envelope(limit=MAX_ROWS)
    # The row at which an attempt begins is one of the extremes of its bin.
    aligned = {**rows.values, "attempt": rows.attempt, "nonfinite": rows.nonfinite}
    for first in range(0, len(rows.step), _CHUNK):
        part = slice(first, first + _CHUNK)
        index = np.arange(first, min(first + _CHUNK, len(rows.step)))
        envelope.add(index, {name: each[part] for name, each in aligned.items()})
    index, _ = envelope.kept()
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
