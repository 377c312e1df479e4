"""Joins the files of a run: merges records of one step, and numbers the attempts.

Steps increase within an attempt. A new attempt begins where a file begins at or before the last
step, or where the step decreases within a file: the run was resumed, and the earlier rows from that
step on are stale. Only the steps of the loss and of the gradient norm count, separately, because an
evaluation that is written late is no resume.
"""

from __future__ import annotations

import bisect
import math
import operator
from collections.abc import Container, Mapping, Sequence

import numpy as np

from healcore.tools.traces.columns import SIGNALS, STEP, Attempt, Log, Rows, Trace, TraceError

_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""
_JUDGED_BITS = ((), (1,), (2,), (1, 2))
"""Bits of the loss and of the gradient norm, by their sum."""


def join_logs(name: str, logs: Sequence[Log]) -> Trace:
    """Joins the files of a run in the order of writing.

    Raises TraceError after `_MAX_ATTEMPTS` restarts.
    """
    begins = np.cumsum([0, *map(_size, logs)]).tolist()
    step = np.arange(begins[-1], dtype=np.float64)
    signals = [signal for signal in SIGNALS if any(signal in log.logged for log in logs)]
    numbers = {signal: np.full(len(step), np.nan) for signal in signals}
    masks = {signal: np.zeros(len(step), bool) for signal in signals}
    for log, begin in zip(logs, begins, strict=False):
        part = slice(begin, begin + _size(log))
        step[part] = log.numbers.get(STEP, step[part])
        for signal, mask in log.logged.items():
            numbers[signal][part], masks[signal][part] = log.numbers[signal], mask
    row, first, starts = _merge(step, masks, begins)
    values = {signal: np.full(len(first), np.nan, np.float32) for signal in signals}
    logged = {signal: np.zeros(len(first), bool) for signal in signals}
    for signal, mask in masks.items():
        with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
            values[signal][row[mask]] = numbers[signal][mask]
        logged[signal][row[mask]] = True
    step = step[first]
    sources = [logs[bisect.bisect(begins, first[start]) - 1].path for start in starts]
    resumed, replaced = _find_resumed_rows(step, starts)
    attempts = [
        Attempt(number, source, start, float(step[start]), after)
        for number, (source, start, after) in enumerate(zip(sources, starts, resumed, strict=True))
    ]
    notes = [note for log in logs for note in log.notes]
    notes += [
        f"{each.source}: the run was resumed: attempt {each.number} begins at step "
        f"{each.first_step:.15g}"
        for each in attempts[1:]
    ]
    problems = [
        f"{log.path}, line {line}: {text}" if line else f"{log.path}: {text}"
        for log in logs
        for line, text in sorted(log.problems, key=operator.itemgetter(0))
    ]
    number = np.searchsorted(starts, np.arange(len(step)), side="right") - 1
    rows = Rows(step, number, values, logged)
    files = len({log.path for log in logs})
    return Trace(name, rows, tuple(attempts), replaced, tuple(problems), tuple(notes), files)


def _size(log: Log) -> int:
    return len(next(iter(log.logged.values())))


def _merge(
    step: np.ndarray, logged: Mapping[str, np.ndarray], begins: Container[int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Merges records of one attempt and step that log different signals.

    `begins` has the first record of each file.

    Returns:
        The row of each record, int (n,); the first record of each row; the first row of each
        attempt.
    """
    if (np.diff(step) > 0).all():
        return np.arange(len(step)), list(range(len(step))), [0]
    bits = np.zeros(len(step), np.int64)
    for name, mask in logged.items():
        bits |= mask.astype(np.int64) << SIGNALS.index(name)
    rows: list[int] = []
    first: list[int] = []
    starts = [0]
    signals: list[int] = []  # bits of each row
    row_at: dict[float, int] = {}  # step -> its last row in the attempt
    last: dict[int, float] = {}  # bit of a judged signal -> its last step in the attempt
    file_begins = False
    for record, (at, own) in enumerate(zip(step.tolist(), bits.tolist(), strict=True)):
        file_begins = file_begins or record in begins
        if judged := _JUDGED_BITS[own & 3]:
            reached = max(last.get(bit, -math.inf) for bit in judged)
            if at < reached or (file_begins and at == reached):
                starts.append(len(first))
                row_at, last = {}, {}
            file_begins = False
            last.update((bit, at) for bit in judged)
        row = row_at.get(at)
        if row is None or not own or own & signals[row]:
            row = row_at[at] = len(first)
            first.append(record)
            signals.append(own)
        signals[row] |= own
        rows.append(row)
    if len(starts) > _MAX_ATTEMPTS:
        raise TraceError(
            f"the steps decrease {len(starts) - 1:,} times. This looks like several runs or ranks "
            "in one file, or a file in reverse order. Write one file per run, with increasing steps"
        )
    return np.array(rows), first, starts


def _find_resumed_rows(step: np.ndarray, starts: list[int]) -> tuple[list[int | None], np.ndarray]:
    """Finds the row that each attempt resumes after, or None for an attempt from scratch.

    Returns the rows, and bool (n,): rows that a later attempt replaced.
    """
    # A row that is written late counts at the step that the run had reached.
    reached = np.concatenate(list(map(np.maximum.accumulate, np.split(step, starts[1:]))))
    replaced = np.zeros(len(step), bool)
    resumed: list[int | None] = [None]
    for start in starts[1:]:
        replaced[:start] |= reached[:start] >= step[start]
        remaining = np.flatnonzero(~replaced[:start])
        resumed.append(int(remaining[-1]) if remaining.size else None)
    return resumed, replaced
