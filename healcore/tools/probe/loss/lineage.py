"""The curve that a run ended with: of steps that were trained again, the last time counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.trace import Attempt, Rows, Trace


class Logged(NamedTuple):
    """Consecutive values of one signal."""

    index: np.ndarray
    """int64 (n,): row numbers in the trace."""
    step: np.ndarray
    """float64 (n,)."""
    value: np.ndarray
    """float64 (n,), NaN and Inf as recorded."""


def current(attempts: Sequence[Attempt]) -> list[tuple[int, int | None]]:
    """The rows that are part of the final curve, as ascending ranges (first, last).

    Args:
        attempts: of the trace, in order. The last range has no end: None.
    """
    ranges: list[tuple[int, int | None]] = []
    last: int | None = None
    for attempt in reversed(attempts):
        if last is not None and last < attempt.first_index:
            continue  # wholly replaced
        ranges.append((attempt.first_index, last))
        if attempt.resumes_after is None:
            break
        last = attempt.resumes_after
    return ranges[::-1]


def logged(trace: Trace, signal: str) -> Iterator[Logged]:
    """The values of a signal along the final curve, a chunk at a time.

    Args:
        trace: what is read.
        signal: one of its signals; rows that do not log it are passed over.
    """
    ranges = current(trace.survey().attempts)
    held: Logged | None = None
    for rows in trace.rows():
        chunk = _chosen(rows, signal, ranges)
        if held is not None:
            chunk = Logged(*(np.concatenate(pair) for pair in zip(held, chunk, strict=True)))
        if not len(chunk.index):
            continue
        # The last one waits: the next chunk may begin with the same step, and then replaces it.
        replaced = np.append(chunk.step[1:] == chunk.step[:-1], True)
        held = Logged(*(part[-1:] for part in chunk))
        yield Logged(*(part[~replaced] for part in chunk))
    if held is not None:
        yield held


def _chosen(rows: Rows, signal: str, ranges: Sequence[tuple[int, int | None]]) -> Logged:
    kept = np.zeros(len(rows.index), bool)
    for first, last in ranges:
        kept |= (rows.index >= first) & (rows.index <= (np.inf if last is None else last))
    if signal in rows.given:
        kept &= rows.given[signal]
        values = rows.values[signal]
    else:
        kept[:] = False
        values = np.zeros(len(rows.index))
    return Logged(rows.index[kept], rows.step[kept], values[kept].astype(np.float64))
