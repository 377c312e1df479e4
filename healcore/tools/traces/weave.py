"""From the files of a run to its rows: one row per step, one number per attempt.

Within an attempt the steps go up. A file that begins at or before the last step, or a step that
goes back within a file, begins a new attempt: the run was resumed there, and what it had logged
beyond is a stale tail. "Goes back" is asked of the loss and the gradient norm, each by itself: an
evaluation that is written a few steps late, or after the training, is no resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.batch import Batch, Reader, cut, joined
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.trace import CHUNK, JUDGED, Rows, TraceError

MOST_ATTEMPTS = 1000
"""More restarts than this are not one run's log, but several writers' in one file."""

WINDOW = CHUNK // 8
"""How many rows late a row may be and still find the row of its step."""


class Woven(NamedTuple):
    """A chunk of rows and what the rows alone do not say."""

    rows: Rows
    source: str
    repeated: int
    """Rows that log a step and a signal which a row before has logged in this attempt."""


def weave(readers: Sequence[Reader], findings: Findings) -> Iterator[Woven]:
    """Reads the files one after the other.

    Args:
        readers: the files in the order of the lineage.
        findings: is told every damage, restart and repeated step.

    Raises:
        TraceError: more than `MOST_ATTEMPTS` restarts.
    """
    weaver = _Weaver(findings)
    for reader in readers:
        weaver.begin(reader.path)
        held: Batch | None = None
        for batch in reader.batches(findings):
            batch = joined(held, weaver.numbered(batch))
            if not len(batch.line):
                continue
            # The last rows wait for the next batch, which may have more of their steps.
            wait = _waiting(batch)
            held = cut(batch, wait, None)
            yield from weaver.rows(cut(batch, 0, wait))
        if held is not None:
            yield from weaver.rows(held)


def _waiting(batch: Batch) -> int:
    """Where the last `WINDOW` rows begin, and the rows before them that are of the same step."""
    step = batch.step
    if step is None or len(step) <= WINDOW:
        return 0
    ends = np.flatnonzero(step[1 : -WINDOW + 1] != step[:-WINDOW])
    if len(ends):
        return int(ends[-1]) + 1
    return 0 if len(step) <= CHUNK else len(step)  # a step that never ends is not waited for


class _Weaver:
    """Where the weaving is: the index, the attempt, and the last step of each signal in it."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.path = ""
        self.base = 0  # rows of the files before this one
        self.next = 0  # index of the next row
        self.attempt = 0
        self.top = -np.inf  # largest step of this attempt
        self.clock: dict[str, float] = {}
        self.fresh = True  # no row of this file has been seen
        self.quiet = False  # this file's repeated steps have been told

    def begin(self, path: str) -> None:
        """The next file."""
        self.path, self.base = path, self.next
        self.fresh, self.quiet = True, False

    def numbered(self, batch: Batch) -> Batch:
        """With the rows' index and a step, where they do not depend on what is merged."""
        if batch.row is not None:
            row = batch.row + self.base
            self.next = self.base + batch.end
        elif batch.step is None:
            row = np.arange(self.next, self.next + len(batch.line))
            self.next += len(batch.line)
        else:
            return batch
        step = row.astype(np.float64) if batch.step is None else batch.step
        return batch._replace(row=row, step=step)

    def rows(self, batch: Batch) -> Iterator[Woven]:
        """Merges the rows of one step, and cuts where an attempt begins."""
        step = batch.step
        if step is None or not len(step):
            return
        if step[0] > self.top and bool((step[1:] > step[:-1]).all()):
            place, starts, repeated = np.arange(len(step)), [], 0
            self.top = float(step[-1])
            for name, given in batch.given.items():
                if given.any():
                    self.clock[name] = float(step[np.flatnonzero(given)[-1]])
            self.fresh = False
        else:
            place, starts, repeated = self._place(batch, step.tolist())
        whole = self._merged(batch, step, place)
        edges = [0, *starts, len(whole.index)]
        for number, (low, high) in enumerate(pairwise(edges)):
            attempt = self.attempt - len(starts) + number
            for at in range(low, high, CHUNK):
                rows = _piece(whole, at, min(at + CHUNK, high), attempt)
                yield Woven(rows, self.path, repeated)
                repeated = 0

    def _place(self, batch: Batch, steps: list[float]) -> tuple[np.ndarray, list[int], int]:
        """Row by row: which merged row each belongs to, where attempts begin, repeats."""
        logs = [
            [name for name, given in batch.given.items() if given[at]] for at in range(len(steps))
        ]
        place = np.empty(len(steps), np.int64)
        starts: list[int] = []
        repeated = count = 0
        rows: dict[float, tuple[int, set[str]]] = {}  # of this attempt, by step
        for at, (step, names) in enumerate(zip(steps, logs, strict=True)):
            trains = JUDGED.intersection(names)
            last = max((self.clock.get(name, -np.inf) for name in trains), default=-np.inf)
            if step < last or (self.fresh and step == last):
                self._restart(int(batch.line[at]), step)
                if count:
                    starts.append(count)
                rows.clear()
            elif step == last:
                repeated += 1
                self._tell_repeat(int(batch.line[at]), step)
            self.fresh = self.fresh and not trains
            self.top = max(self.top, step)
            self.clock.update(dict.fromkeys(names, step))
            row, merged = rows.get(step, (count, set()))
            if merged.intersection(names) or (row < count and not names):
                row, merged = count, set()
            rows[step] = (row, merged.union(names))
            place[at] = row
            count = max(count, row + 1)
        return place, starts, repeated

    def _restart(self, line: int, step: float) -> None:
        self.attempt += 1
        if self.attempt >= MOST_ATTEMPTS:
            raise TraceError(
                f"{self.path}, line {line}: the steps go back for the {MOST_ATTEMPTS:,}th time. A "
                "resumed run goes back now and then; this looks like several runs or ranks in one "
                "file, or one sorted the other way round. Write one file per run, steps going up"
            )
        self.findings.note(
            self.path,
            line or None,
            f"step {step:.15g} comes after step {self.top:.15g}: the run goes back, and attempt "
            f"{self.attempt} begins",
        )
        self.top = -np.inf
        self.clock.clear()

    def _tell_repeat(self, line: int, step: float) -> None:
        if not self.quiet:
            self.findings.note(
                self.path,
                line or None,
                f"step {step:.15g} is logged once more. Both rows are read, the later one counts "
                "in the curve; further repeats in this file are counted only",
            )
        self.quiet = True

    def _merged(self, batch: Batch, step: np.ndarray, place: np.ndarray) -> Rows:
        count = int(place.max()) + 1
        first = np.full(count, -1)
        first[place[::-1]] = np.arange(len(place))[::-1]
        if batch.row is None:
            index = np.arange(self.next, self.next + count)
            self.next += count
        else:
            index = batch.row[first]
            if "loss" in batch.given and len(place) > count:
                # Merged table rows are known by the row that has the loss.
                with_loss = index.copy()
                with_loss[place[batch.given["loss"]]] = batch.row[batch.given["loss"]]
                index = with_loss if (np.diff(with_loss) > 0).all() else index
        values, given = {}, {}
        for name, logged in batch.given.items():
            values[name] = np.full(count, np.nan, np.float32)
            values[name][place[logged]] = batch.values[name][logged]
            given[name] = np.zeros(count, bool)
            given[name][place[logged]] = True
        return Rows(int(index[0]), index, step[first], values, given, self.attempt)


def _piece(rows: Rows, low: int, high: int, attempt: int) -> Rows:
    part = slice(low, high)
    return Rows(
        start=int(rows.index[low]),
        index=rows.index[part],
        step=rows.step[part],
        values={name: value[part] for name, value in rows.values.items()},
        given={name: value[part] for name, value in rows.given.items()},
        attempt=attempt,
    )
