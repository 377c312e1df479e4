"""One signal along the curve that a run ended with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from healcore.tools.traces import Trace, lineage


class Logged(NamedTuple):
    """Consecutive values of one signal."""

    index: np.ndarray
    """int64 (n,): row numbers in the trace."""
    step: np.ndarray
    """float64 (n,)."""
    value: np.ndarray
    """float64 (n,), NaN and Inf as recorded."""


def logged(trace: Trace, signal: str) -> Iterator[Logged]:
    """The values of a signal, a chunk at a time; of steps trained again those of the last time.

    Args:
        trace: what is read.
        signal: one of its signals; rows that do not log it are passed over.
    """
    for rows in lineage(trace):
        if signal in rows.given and rows.given[signal].any():
            there = rows.given[signal]
            value = rows.values[signal][there].astype(np.float64)
            yield Logged(rows.index[there], rows.step[there], value)
