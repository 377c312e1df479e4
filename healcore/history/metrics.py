"""From the rows of a run, however many, to its curves and counts, and to its incidents' rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from healcore.history.curves import Curves
from healcore.history.envelope import Envelope
from healcore.history.incident import Incident
from healcore.history.metric_lines import CURVES, Chunk

ROWS = 9000
"""Most rows that are kept: some 450 stretches of which all extremes stay, or more."""

_WHOLE = 2.0**24
"""Float32, in which an envelope keeps its columns, has all whole numbers up to here."""


class Gathered(NamedTuple):
    """What the rows have."""

    curves: Curves
    incidents: tuple[Incident, ...]
    """With their `onset` and `index`."""
    counted: MetricCounts | None
    """None: the rows do not say what the policy made of them."""


class MetricCounts:
    """What the metrics know of alarms, chunk by chunk: all, where events have an incident's first.

    Of metrics that were thinned they are estimates.

    Args:
        incidents: by attempt and step.

    Attributes:
        known: the rows say what the policy made of them.
        alarms: steps with a cause.
        skips: steps that were skipped.
        clips: steps whose gradients were clipped.
        ends: by place in `incidents`, step and index of the last alarm.
    """

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self.known = False
        self.alarms = self.skips = self.clips = 0
        self.ends: dict[int, tuple[float, int]] = {}
        self._skipped: Counter[int] = Counter()
        self._begins: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, case in enumerate(incidents):
            self._begins[case.attempt].append((case.onset_step, place))
        for begins in self._begins.values():
            begins.sort()

    def add(self, chunk: Chunk, index: np.ndarray) -> None:
        """Takes one chunk and the indices of its rows."""
        if chunk.flags is None:
            return
        self.known = True
        alarm, skip, clip = chunk.flags.T
        every = 1 if chunk.every is None else chunk.every
        self.alarms += int((alarm * every).sum())
        self.skips += int((skip * every).sum())
        self.clips += int(((clip & ~skip) * every).sum())
        for attempt in np.unique(chunk.attempt[alarm]).tolist():
            begins = self._begins.get(attempt)
            if begins:
                self._extend(begins, alarm & (chunk.attempt == attempt), chunk, index)

    def _extend(
        self,
        begins: list[tuple[float, int]],
        rows: np.ndarray,
        chunk: Chunk,
        index: np.ndarray,
    ) -> None:
        """An alarm is of the incident that has begun last."""
        assert chunk.flags is not None
        step, index, skip = chunk.step[rows], index[rows], chunk.flags[rows, 1]
        which = np.searchsorted([onset for onset, _ in begins], step, side="right") - 1
        for each in np.unique(which[which >= 0]).tolist():
            place, mine = begins[each][1], np.flatnonzero(which == each)
            self.ends[place] = float(step[mine[-1]]), int(index[mine[-1]])
            self._skipped[place] += int(skip[mine].sum())

    def completed(self, place: int, case: Incident) -> Incident:
        """An incident with the alarms that have no event of their own.

        Args:
            place: of it in the incidents.
            case: as the events have it.
        """
        step, _ = self.ends.get(place, (case.step, -1))
        skipped = max(case.skipped, self._skipped[place])
        return case._replace(skipped=skipped, step=max(case.step, step), capped=False)


def gather(chunks: Iterable[Chunk], incidents: Sequence[Incident]) -> Gathered:
    """Thins the curves, finds the rows of the incidents, and counts.

    Args:
        chunks: of one run, in order.
        incidents: in order.
    """
    envelope = Envelope(limit=ROWS)
    counted = MetricCounts(incidents)
    wanted = {(case.attempt, at) for case in incidents for at in (case.onset_step, case.step)}
    attempts = {attempt for attempt, _ in wanted}
    found: dict[tuple[int, float], int] = {}
    seen: set[str] = set()
    rows = 0
    for chunk in chunks:
        index = np.arange(rows, rows + len(chunk.step))
        rows += len(index)
        counted.add(chunk, index)
        seen |= {name for name, values in chunk.values.items() if np.any(~np.isnan(values))}
        marked = np.where(chunk.nonfinite, np.float32(1), np.float32(0))
        high, low = np.divmod(chunk.step, _WHOLE)
        aligned = {"high": high, "low": low, "attempt": chunk.attempt, "nonfinite": marked}
        envelope.add(index, {**chunk.values, **aligned})
        if attempts.intersection(chunk.attempt.tolist()):
            pairs = zip(chunk.attempt.tolist(), chunk.step.tolist(), strict=True)
            found |= {
                pair: i for pair, i in zip(pairs, index.tolist(), strict=True) if pair in wanted
            }
    curves = _curves(envelope, seen, rows)
    placed = []
    for place, case in enumerate(incidents):
        if counted.known and case.capped:
            case = counted.completed(place, case)
        step, index = counted.ends.get(place, (-1.0, -1))
        index = index if step == case.step else found.get((case.attempt, case.step), -1)
        onset = found.get((case.attempt, case.onset_step), -1)
        placed.append(case._replace(onset=onset, index=index))
    return Gathered(curves, tuple(placed), counted if counted.known else None)


def _curves(envelope: Envelope, seen: set[str], rows: int) -> Curves:
    if not rows:
        return Curves(np.zeros(0), np.zeros(0, np.float32), rows=0)
    index, values = envelope.kept()
    nonfinite = values["nonfinite"] > 0
    curve = {name: values[name] if name in seen else None for name in CURVES}
    loss = values["loss"]
    return Curves(
        step=values["high"].astype(np.float64) * _WHOLE + values["low"],
        loss=loss,
        grad_norm=curve["grad_norm"],
        threshold=curve["threshold"],
        lr_scale=curve["lr_scale"],
        index=index,
        attempt=values["attempt"].astype(np.int64),
        nonfinite=nonfinite,
        rows=rows,
    )
