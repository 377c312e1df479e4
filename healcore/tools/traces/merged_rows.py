"""Merges the files of a run into rows, one per step, and numbers the attempts.

Steps increase within an attempt. A file that begins at or before the last step, or a step that goes
back within a file, begins a new attempt: the run was resumed, and the rows logged beyond that step
are a stale tail. Only the loss and the gradient norm count, each by itself: an evaluation that is
written late is no resume.
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

_MOST_ATTEMPTS = 1000
"""More restarts mean several writers in one file, not one run."""

_WINDOW = CHUNK // 8
"""How many rows late a row may be and still be merged with the row of its step."""


class LogReader(Protocol):
    """One file of a known format; it can be read repeatedly."""

    path: str
    run: str | None
    """The run of a file of several, or None."""
    notes: list[str]
    """Remarks about the names of the columns."""
    rows_read: int
    """Rows that `chunks` has read, including ignored rows, if the file numbers its rows (CSV)."""

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """The file from its beginning, at most `CHUNK` rows at a time.

        `index` are the file's own row numbers, or -1 where rows are counted once merged. `step` is
        finite, or NaN in every row of a file without steps.
        """
        ...


def merge_rows(readers: Sequence[LogReader], findings: Findings) -> Iterator[Rows]:
    """Reads the files in the order in which they were written; `findings` collects all remarks.

    Raises TraceError after `_MOST_ATTEMPTS` restarts.
    """
    merger = _Merger(findings)
    for reader in readers:
        merger.begin(reader.path)
        held: Rows | None = None
        for chunk in reader.chunks(findings):
            if not len(chunk.line):
                continue
            chunk = _joined(held, merger.numbered(chunk))
            # The last rows wait for the next chunk, which may have more rows of their steps.
            wait = _waiting(chunk)
            held = select_rows(chunk, slice(wait, None))
            yield from merger.merge(select_rows(chunk, slice(0, wait)))
        if held is not None:
            yield from merger.merge(held)
        merger.next = max(merger.next, merger.base + reader.rows_read)


def _joined(first: Rows | None, second: Rows) -> Rows:
    if first is None or not len(first.line):
        return second
    lengths = len(first.line), len(second.line)
    return second._replace(
        index=np.concatenate([first.index, second.index]),
        step=np.concatenate([first.step, second.step]),
        values=join_columns([first.values, second.values], lengths, np.float32(np.nan)),
        given=join_columns([first.given, second.given], lengths, np.False_),
        line=np.concatenate([first.line, second.line]),
    )


def _waiting(chunk: Rows) -> int:
    """Where the last `_WINDOW` rows begin, including the rows before them of the same step."""
    step = chunk.step
    if len(step) <= _WINDOW:
        return 0
    ends = np.flatnonzero(step[1 : -_WINDOW + 1] != step[:-_WINDOW])
    if len(ends):
        return int(ends[-1]) + 1
    return 0 if len(step) <= CHUNK else len(step)  # a step of more rows does not wait


class _Merger:
    """The state of the merge: the index, the attempt, and the last step of each signal in it."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.path = ""
        self.base = 0  # rows of the files before this one
        self.next = 0  # index of the next row
        self.attempt = 0
        self.top = -np.inf  # largest step of this attempt
        self.last_steps: dict[str, float] = {}
        self.first_row = True  # no row of this file has been merged
        self.repeat_reported = False  # a repeated step of this file has been reported

    def begin(self, path: str) -> None:
        self.path, self.base = path, self.next
        self.first_row, self.repeat_reported = True, False

    def numbered(self, chunk: Rows) -> Rows:
        """Adds the rows' index and step if they do not depend on the merge."""
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
        if step[0] > self.top and bool((step[1:] > step[:-1]).all()):
            place, starts = np.arange(len(step)), []
            self.top = float(step[-1])
            for name, given in chunk.given.items():
                if given.any():
                    self.last_steps[name] = float(step[np.flatnonzero(given)[-1]])
            self.first_row = False
        else:
            place, starts = self._place(chunk, step.tolist())
        whole = self._merged(chunk, step, place)
        for number, (low, high) in enumerate(pairwise([0, *starts, len(whole.index)])):
            attempt = whole._replace(attempt=self.attempt - len(starts) + number)
            for at in range(low, high, CHUNK):
                yield select_rows(attempt, slice(at, min(at + CHUNK, high)))

    def _place(self, chunk: Rows, steps: list[float]) -> tuple[np.ndarray, list[int]]:
        """Row by row: the merged row of each, and the starts of attempts."""
        logs = [
            [name for name, given in chunk.given.items() if given[at]] for at in range(len(steps))
        ]
        place = np.empty(len(steps), np.int64)
        starts: list[int] = []
        count = 0
        rows: dict[float, tuple[int, set[str]]] = {}  # of this attempt, by step
        for at, (step, names) in enumerate(zip(steps, logs, strict=True)):
            trains = JUDGED.intersection(names)
            last = max((self.last_steps.get(name, -np.inf) for name in trains), default=-np.inf)
            if step < last or (self.first_row and step == last):
                self._restart(int(chunk.line[at]), step)
                if count:
                    starts.append(count)
                rows.clear()
            elif step == last:
                self._report_repeat(int(chunk.line[at]), step)
            self.first_row = self.first_row and not trains
            self.top = max(self.top, step)
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
        if self.attempt >= _MOST_ATTEMPTS:
            raise TraceError(
                f"{self.path}, line {line}: the steps go back for the {_MOST_ATTEMPTS:,}th time. A "
                "resumed run goes back now and then; this looks like several runs or ranks in one "
                "file, or one sorted backwards. Write one file per run, steps going up"
            )
        self.findings.note(
            self.path,
            line,
            f"step {step:.15g} comes after step {self.top:.15g}: the run goes back, and attempt "
            f"{self.attempt} begins",
        )
        self.top = -np.inf
        self.last_steps.clear()

    def _report_repeat(self, line: int, step: float) -> None:
        if not self.repeat_reported:
            self.findings.note(
                self.path,
                line,
                f"step {step:.15g} is logged again. Both rows are read, the later one counts "
                "in the curve; further repeats in this file are not reported",
            )
        self.repeat_reported = True

    def _merged(self, chunk: Rows, step: np.ndarray, place: np.ndarray) -> Rows:
        count = int(place.max()) + 1
        first = np.full(count, -1)
        first[place[::-1]] = np.arange(len(place))[::-1]
        if chunk.index[0] < 0:
            index = np.arange(self.next, self.next + count)
            self.next += count
        else:
            index = chunk.index[first]
            if "loss" in chunk.given and len(place) > count:
                # Merged table rows have the number of the row with the loss.
                with_loss = index.copy()
                with_loss[place[chunk.given["loss"]]] = chunk.index[chunk.given["loss"]]
                index = with_loss if (np.diff(with_loss) > 0).all() else index
        values, given = {}, {}
        for name, logged in chunk.given.items():
            values[name] = np.full(count, np.nan, np.float32)
            values[name][place[logged]] = chunk.values[name][logged]
            given[name] = np.zeros(count, bool)
            given[name][place[logged]] = True
        line = chunk.line[first]
        return Rows(index, step[first], values, given, line, self.path, self.attempt)
