"""A trace as the sweep runs it: columns in memory, a series of its own for each attempt."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from healcore.core.engine import Engine
from healcore.tools.replay.feeding import Chunk, Feed, chunk_of, feed_of
from healcore.tools.traces.trace import Trace


class Series(NamedTuple):
    """The rows of one attempt that an engine judges, with those of its lineage before it."""

    trace: str
    """Name of the trace."""
    feed: Feed
    rows: Chunk
    index: np.ndarray
    """int64 (n,): their rows in the trace."""
    resumed: np.ndarray
    """bool (n,): the first row after the checkpoint that a resumed attempt went on from."""
    own: int
    """Rows before this one are of earlier attempts: judged, to have the state, not counted."""

    @property
    def length(self) -> int:
        """Rows, those of its lineage included."""
        return len(self.index)


def series_of(trace: Trace, engine: Engine) -> list[Series]:
    """Reads a trace whole; one series for each attempt that has rows to judge.

    Args:
        trace: what `open_traces` gives.
        engine: the base policy: says which signals are read.

    Raises:
        healcore.tools.traces.TraceError: it cannot be read.
    """
    survey = trace.survey()
    feed = feed_of(engine, survey.combinations)
    if not feed.combinations:
        return []
    parts: list[tuple[Chunk, np.ndarray, np.ndarray]] = []
    for chunk in trace.rows():
        rows, places = chunk_of(feed, engine, chunk.values, chunk.given)
        parts.append((rows, chunk.index[places], np.full(len(places), chunk.attempt)))
    whole = Chunk(
        {name: np.concatenate([p[0].values[name] for p in parts]) for name in feed.signals},
        np.concatenate([p[0].kind for p in parts]),
    )
    index = np.concatenate([p[1] for p in parts])
    number = np.concatenate([p[2] for p in parts])
    found = []
    lineage = np.zeros(0, np.int64)
    for attempt in survey.attempts:
        mine = np.flatnonzero(number == attempt.number)
        after = -1 if attempt.resumes_after is None else attempt.resumes_after
        before = lineage[index[lineage] <= after]
        lineage = np.concatenate([before, mine])
        if not len(mine):
            continue
        resumed = np.zeros(len(lineage), bool)
        resumed[len(before)] = len(before) > 0
        rows = Chunk({k: v[lineage] for k, v in whole.values.items()}, whole.kind[lineage])
        found.append(Series(trace.name, feed, rows, index[lineage], resumed, len(before)))
    return found
