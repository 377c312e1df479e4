"""Merges the files of a run into rows, one per step, and numbers the attempts.

Steps increase within an attempt. A new attempt begins where a file begins at or before the last
step, or where the step decreases within a file: the run was resumed, and the earlier rows from that
step on are stale. Only the steps of the loss and of the gradient norm count, separately, because an
evaluation that is written late is no resume.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np

from healcore.tools.traces.trace import (
    CHUNK,
    JUDGED,
    Findings,
    Rows,
    TraceError,
    join_columns,
    select_rows,
)

_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""

_MAX_DELAY = CHUNK // 8
"""Number of rows by which a row may be late and still be merged with the row of its step."""


class LogReader(Protocol):
    """Reads one file of a known format, repeatedly if needed."""

    path: str
    run: str | None
    """Name of the run in a file with several runs, or None."""
    notes: list[str]
    """Remarks about the names of the columns."""
    rows_read: int
    """Number of rows that `chunks` has read, including skipped rows, for files with row numbers."""

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """Yields the file from its beginning, at most `CHUNK` rows at a time.

        `index` has the row numbers in the file, or -1 if rows are numbered after they are merged.
        `step` is finite, or NaN in every row of a file without steps.
        """
        ...


def merge_rows(readers: Sequence[LogReader], findings: Findings) -> Iterator[Rows]:
    """Yields the merged rows of files in the order of writing; `findings` collects all remarks.

    Raises TraceError after `_MAX_ATTEMPTS` restarts.
    """
    merger = _Merger(findings)
    for reader in readers:
        merger.begin(reader.path)
        waiting: Rows | None = None
        for chunk in reader.chunks(findings):
            if not len(chunk.line):
                continue
            chunk = _join(waiting, merger.number_rows(chunk))
            # The last rows wait, because the next chunk may have more rows of their steps.
            ready = _count_ready(chunk)
            waiting = select_rows(chunk, slice(ready, None))
            yield from merger.merge(select_rows(chunk, slice(0, ready)))
        if waiting is not None:
            yield from merger.merge(waiting)
        merger.next = max(merger.next, merger.base + reader.rows_read)


def _join(first: Rows | None, second: Rows) -> Rows:
    if first is None or not len(first.line):
        return second
    lengths = len(first.line), len(second.line)
    return second._replace(
        index=np.concatenate([first.index, second.index]),
        step=np.concatenate([first.step, second.step]),
        values=join_columns([first.values, second.values], lengths, np.float32(np.nan)),
        logged=join_columns([first.logged, second.logged], lengths, np.False_),
        line=np.concatenate([first.line, second.line]),
    )


def _count_ready(chunk: Rows) -> int:
    """Counts the rows before the last `_MAX_DELAY` rows and the step in which these begin."""
    step = chunk.step
    if len(step) <= _MAX_DELAY:
        return 0
    ends = np.flatnonzero(step[1 : -_MAX_DELAY + 1] != step[:-_MAX_DELAY])
    if len(ends):
        return int(ends[-1]) + 1
    return 0 if len(step) <= CHUNK else len(step)  # a step with more rows does not wait


class _Merger:
    """Merges rows across files: knows the next index, the attempt and each signal's last step."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.path = ""
        self.base = 0  # number of rows in the earlier files
        self.next = 0  # index of the next row
        self.attempt = 0
        self.max_step = -np.inf  # in the current attempt
        self.last_steps: dict[str, float] = {}
        self.at_start = True  # no row of the current file has been merged
        self.repeat_reported = False  # for the current file

    def begin(self, path: str) -> None:
        self.path, self.base = path, self.next
        self.at_start, self.repeat_reported = True, False

    def number_rows(self, chunk: Rows) -> Rows:
        """Sets index and step of the rows, if these do not depend on the merge."""
        without_steps = bool(np.isnan(chunk.step[0]))
        if chunk.index[0] >= 0:
            index = chunk.index + self.base
        elif without_steps:
            index = np.arange(self.next, self.next + len(chunk.line))
            self.next += len(chunk.line)
        else:
            return chunk
        step = index.astype(np.float64) if without_steps else chunk.step
        return chunk._replace(index=index, step=step)

    def merge(self, chunk: Rows) -> Iterator[Rows]:
        step = chunk.step
        if not len(step):
            return
        if step[0] > self.max_step and bool((step[1:] > step[:-1]).all()):
            place, starts = np.arange(len(step)), []
            self.max_step = float(step[-1])
            for name, logged in chunk.logged.items():
                if logged.any():
                    self.last_steps[name] = float(step[np.flatnonzero(logged)[-1]])
            self.at_start = False
        else:
            place, starts = self._assign_rows(chunk, step.tolist())
        merged = self._fill_rows(chunk, step, place)
        for number, (low, high) in enumerate(pairwise([0, *starts, len(merged.index)])):
            attempt = merged._replace(attempt=self.attempt - len(starts) + number)
            for at in range(low, high, CHUNK):
                yield select_rows(attempt, slice(at, min(at + CHUNK, high)))

    def _assign_rows(self, chunk: Rows, steps: list[float]) -> tuple[np.ndarray, list[int]]:
        """Returns the merged row of each row, int64 (n,), and the first rows of new attempts."""
        signals = [
            [name for name, logged in chunk.logged.items() if logged[at]]
            for at in range(len(steps))
        ]
        place = np.empty(len(steps), np.int64)
        starts: list[int] = []
        count = 0
        rows: dict[float, tuple[int, set[str]]] = {}  # merged rows of the attempt by step
        for at, (step, names) in enumerate(zip(steps, signals, strict=True)):
            judged = JUDGED.intersection(names)
            last = max((self.last_steps.get(name, -np.inf) for name in judged), default=-np.inf)
            if step < last or (self.at_start and step == last):
                self._restart(int(chunk.line[at]), step)
                if count:
                    starts.append(count)
                rows.clear()
            elif step == last:
                self._report_repeat(int(chunk.line[at]), step)
            self.at_start = self.at_start and not judged
            self.max_step = max(self.max_step, step)
            self.last_steps.update(dict.fromkeys(names, step))
            row, merged = rows.get(step, (count, set()))
            if merged.intersection(names) or (row < count and not names):
                row, merged = count, set()
            rows[step] = (row, merged.union(names))
            place[at] = row
            count = max(count, row + 1)
        return place, starts

    def _restart(self, line: int, step: float) -> None:
        self.attempt += 1
        if self.attempt >= _MAX_ATTEMPTS:
            raise TraceError(
                f"{self.path}, line {line}: the steps decrease for the {_MAX_ATTEMPTS:,}th "
                "time. This looks like several runs or ranks in one file, or a file in reverse "
                "order. Write one file per run, with increasing steps"
            )
        self.findings.note(
            self.path,
            line,
            f"step {step:.15g} follows step {self.max_step:.15g}: the run was resumed, and attempt "
            f"{self.attempt} begins",
        )
        self.max_step = -np.inf
        self.last_steps.clear()

    def _report_repeat(self, line: int, step: float) -> None:
        if not self.repeat_reported:
            self.findings.note(
                self.path,
                line,
                f"step {step:.15g} is logged again. Both rows are read, and the later row counts "
                "in the curve; more repeats in this file are not reported",
            )
        self.repeat_reported = True

    def _fill_rows(self, chunk: Rows, step: np.ndarray, place: np.ndarray) -> Rows:
        count = int(place.max()) + 1
        first = np.full(count, -1)
        first[place[::-1]] = np.arange(len(place))[::-1]
        if chunk.index[0] < 0:
            index = np.arange(self.next, self.next + count)
            self.next += count
        else:
            index = chunk.index[first]
            if "loss" in chunk.logged and len(place) > count:
                # A merged row of a table has the number of its row with the loss.
                with_loss = index.copy()
                with_loss[place[chunk.logged["loss"]]] = chunk.index[chunk.logged["loss"]]
                index = with_loss if (np.diff(with_loss) > 0).all() else index
        values, logged = {}, {}
        for name, mask in chunk.logged.items():
            values[name] = np.full(count, np.nan, np.float32)
            values[name][place[mask]] = chunk.values[name][mask]
            logged[name] = np.zeros(count, bool)
            logged[name][place[mask]] = True
        line = chunk.line[first]
        return Rows(index, step[first], values, logged, line, self.path, self.attempt)
