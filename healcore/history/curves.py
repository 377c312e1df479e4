"""Makes the curves of a run: thinned for plots, with gaps, and with the rows of its incidents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.history.incident import Incident
from healcore.history.metrics import CURVES, MetricRows

MAX_ROWS = 9000  # about 450 bins or more, with all their extremes

_EXACT = 2.0**24  # float32, the dtype of an envelope's columns, has all whole numbers up to here
_MIN_MISSING = 10  # rows, at the usual distance, that make a gap; a log may skip single ones
_MAX_GAPS = 20  # with more gaps a log changes its stride, or has none


class Gap(NamedTuple):
    """Missing steps between two rows."""

    row: int  # index in the curves of the first row after it
    low: float  # step of the last row before it
    high: float
    missing: float  # missing rows, at the usual distance
    stride: float
    exact: bool  # not thinned here: there is no row between `low` and `high`


class Curves(NamedTuple):
    """Curves, thinned, row by row in recorded order; every array is (n,).

    A value is NaN where it was not logged or is NaN, and infinite where it was recorded so.
    `nonfinite` marks values that were logged and are not finite.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None  # a gradient norm above it is clipped, or is a spike
    lr_scale: np.ndarray | None = None  # multiplier of the learning rate
    index: np.ndarray | None = None  # int64, of the rows in the trace; None: 0, 1, 2, ...
    attempt: np.ndarray | None = None  # int64; None: all of them are attempt 0
    nonfinite: np.ndarray | None = None  # bool: logged loss or norm not finite; None: not known
    rows: int | None = None  # rows before thinning; None: these are all
    isolated: bool = False  # only single steps are known: points, without a line between them

    def undone(self) -> np.ndarray:
        """Bool (n,): rows replaced by a later attempt, which began at or before their step."""
        if self.attempt is None or not len(self.step):
            return np.zeros(len(self.step), bool)
        undone = np.zeros(len(self.step), bool)
        # In recorded order, all rows after an attempt's first are of it or of a later one.
        begins = np.flatnonzero(np.diff(self.attempt)) + 1
        for begin in begins:
            undone[:begin] |= self.step[:begin] >= self.step[begin]
        return undone

    def gaps(self) -> list[Gap]:
        """Where steps are missing in curves that have nearly all others.

        A kill loses the metrics of half a second; other logs have gaps too.
        """
        if self.isolated or len(self.step) < 3:
            return []
        index = np.arange(len(self.step)) if self.index is None else self.index
        # In thinned curves, `rows` counts the rows from one kept row to the next.
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


class Envelope:
    """Streaming down-sampling of aligned curves for plots, to at most `limit` rows.

    Rows are put into bins of equal width (of index). Of each curve, a bin keeps the rows of the
    smallest, the largest and the first non-finite value. When there are too many bins the width
    doubles. Bins are aligned, so that the extremes of two are those of their union, and the result
    does not depend on the chunks. The first and the last row are always kept. `limit` is at least
    what one bin needs.

    Largest-triangle-three-buckets was rejected: its lines are smoother, but it may leave out a
    spike of one row, which is what these plots are for.
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
        # Only after several times the limit: amortised, O(1) per row.
        if self._count > 4 * self._limit + 4096:
            self._thin(2 * self._limit)

    def kept(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The kept rows: their index (m,) and the curves (m,)."""
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
        """Flags (n,): the first and last row, and of each bin the extremes of each curve."""
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


class RunMetrics(NamedTuple):
    """The curves and counts of a run, from its metrics."""

    curves: Curves
    incidents: tuple[Incident, ...]  # with `onset` and `index`
    counted: MetricCounts | None  # None: the rows do not have alarms and skips


class MetricCounts:
    """Counts of alarms in the metrics, which have all; only an incident's first ones have events.

    For thinned metrics they are estimates.
    """

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self.known = False  # the rows have alarms and skips
        self.alarms = self.skips = self.clips = 0
        # Skipped steps that were not undone, with the steps that each row stands for.
        self._standing = np.empty((0, 2))
        self._attempt = -1
        # By place in `incidents`: step and index of the last alarm.
        self.ends: dict[int, tuple[float, int]] = {}
        self._skipped: Counter[int] = Counter()
        self._begins: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, incident in enumerate(incidents):
            self._begins[incident.attempt].append((incident.onset_step, place))
        for begins in self._begins.values():
            begins.sort()

    def add(self, rows: MetricRows, index: np.ndarray) -> None:
        """Adds rows, with their indices."""
        if rows.flags is None:
            return
        self.known = True
        alarm, skip, clip = rows.flags.T
        every = 1 if rows.every is None else rows.every
        self.alarms += int((alarm * every).sum())
        self.skips += int((skip * every).sum())
        self.clips += int(((clip & ~skip) * every).sum())
        for attempt in np.unique(rows.attempt).tolist():
            mine = rows.attempt == attempt
            if attempt != self._attempt:
                self._attempt = attempt
                self._standing = self._standing[self._standing[:, 0] < rows.step[mine][0]]
            each = np.stack([rows.step, np.broadcast_to(every, rows.step.shape)], axis=1)
            self._standing = np.concatenate([self._standing, each[mine & skip]])
        for attempt in np.unique(rows.attempt[alarm]).tolist():
            begins = self._begins.get(attempt)
            if begins:
                self._extend(begins, rows, index, alarm & (rows.attempt == attempt))

    @property
    def undone_skips(self) -> int:
        """Skipped steps that a later attempt has undone."""
        return self.skips - int(self._standing[:, 1].sum())

    def _extend(
        self,
        begins: list[tuple[float, int]],
        rows: MetricRows,
        index: np.ndarray,
        alarms: np.ndarray,
    ) -> None:
        """Assigns each alarm to the last incident that began before it."""
        assert rows.flags is not None
        step, index, skip = rows.step[alarms], index[alarms], rows.flags[alarms, 1]
        which = np.searchsorted([onset for onset, _ in begins], step, side="right") - 1
        for each in np.unique(which[which >= 0]).tolist():
            place, mine = begins[each][1], np.flatnonzero(which == each)
            self.ends[place] = float(step[mine[-1]]), int(index[mine[-1]])
            self._skipped[place] += int(skip[mine].sum())

    def completed(self, place: int, incident: Incident) -> Incident:
        """The incident at `place`, with the alarms that have no event."""
        step, _ = self.ends.get(place, (incident.step, -1))
        skipped = max(incident.skipped, self._skipped[place])
        return incident._replace(skipped=skipped, step=max(incident.step, step), capped=False)


def gather(chunks: Iterable[MetricRows], incidents: Sequence[Incident]) -> RunMetrics:
    """Thins the curves of one run, finds the rows of the incidents, and counts; all in order."""
    envelope = Envelope(limit=MAX_ROWS)
    counted = MetricCounts(incidents)
    wanted = {(each.attempt, at) for each in incidents for at in (each.onset_step, each.step)}
    attempts = {attempt for attempt, _ in wanted}
    found: dict[tuple[int, float], int] = {}
    seen: set[str] = set()
    count = 0
    for rows in chunks:
        index = np.arange(count, count + len(rows.step))
        count += len(index)
        counted.add(rows, index)
        seen |= {name for name, values in rows.values.items() if np.any(~np.isnan(values))}
        marked = np.where(rows.nonfinite, np.float32(1), np.float32(0))
        high, low = np.divmod(rows.step, _EXACT)
        aligned = {"high": high, "low": low, "attempt": rows.attempt, "nonfinite": marked}
        envelope.add(index, {**rows.values, **aligned})
        if attempts.intersection(rows.attempt.tolist()):
            pairs = zip(rows.attempt.tolist(), rows.step.tolist(), strict=True)
            found |= {
                pair: i for pair, i in zip(pairs, index.tolist(), strict=True) if pair in wanted
            }
    curves = _curves(envelope, seen, count)
    placed = []
    for place, incident in enumerate(incidents):
        if counted.known and incident.capped:
            incident = counted.completed(place, incident)
        step, index = counted.ends.get(place, (-1.0, -1))
        index = index if step == incident.step else found.get((incident.attempt, incident.step), -1)
        onset = found.get((incident.attempt, incident.onset_step), -1)
        placed.append(incident._replace(onset=onset, index=index))
    return RunMetrics(curves, tuple(placed), counted if counted.known else None)


def _curves(envelope: Envelope, seen: set[str], count: int) -> Curves:
    if not count:
        return Curves(np.zeros(0), np.zeros(0, np.float32), rows=0)
    index, values = envelope.kept()
    curve = {name: values[name] if name in seen else None for name in CURVES}
    return Curves(
        step=values["high"].astype(np.float64) * _EXACT + values["low"],
        loss=values["loss"],
        grad_norm=curve["grad_norm"],
        threshold=curve["threshold"],
        lr_scale=curve["lr_scale"],
        index=index,
        attempt=values["attempt"].astype(np.int64),
        nonfinite=values["nonfinite"] > 0,
        rows=count,
    )
