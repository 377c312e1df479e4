"""What of a trace a policy is given: which signals, and in which combinations rows have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from healcore.core.engine import Engine

ALWAYS = ("loss", "grad_norm")
"""Given wherever they were logged: what is not finite is never applied, whatever a policy reads."""

ON_DEMAND = ("update_norm", "eval_loss")
"""Given only where the policy reads them, as the adapters do."""


class Feed(NamedTuple):
    """The signals of one trace that one policy is given; a compiled loop belongs to it."""

    combinations: tuple[tuple[str, ...], ...]
    """Signals that rows have together, every combination once, in a fixed order."""

    @property
    def signals(self) -> tuple[str, ...]:
        """Every signal that some row is given."""
        named = {name for combination in self.combinations for name in combination}
        return tuple(name for name in (*ALWAYS, *ON_DEMAND) if name in named)


class Chunk(NamedTuple):
    """Consecutive rows to be judged, as a runner takes them."""

    values: dict[str, np.ndarray]
    """float32 (n,) for each of the feed's signals; meaningless where the row does not have it."""
    kind: np.ndarray
    """int32 (n,): which of the feed's combinations the row has."""

    def part(self, rows: slice) -> Chunk:
        """Some of the rows."""
        return Chunk({name: each[rows] for name, each in self.values.items()}, self.kind[rows])


def feed_of(engine: Engine, combinations: Iterable[frozenset[str]]) -> Feed:
    """What an engine is given of a trace.

    Args:
        engine: the policy.
        combinations: sets of signals that rows of the trace log together.
    """
    combinations = list(combinations)
    logged = frozenset().union(*combinations)
    found = {_given(engine, each, logged) for each in combinations}
    return Feed(tuple(sorted(found - {()})))


def chunk_of(
    feed: Feed, engine: Engine, values: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray]
) -> tuple[Chunk, np.ndarray]:
    """Rows of a trace as a chunk.

    Args:
        feed: from `feed_of` of the whole trace.
        engine: the policy.
        values: float32 (n,) by signal.
        given: bool (n,) by signal: logged in this row.

    Returns:
        The rows that are judged, and their places among all of them, int (m,).
    """
    names = [name for name in feed.signals if name in given]
    length = len(next(iter(given.values()), ()))
    # One bit for each signal; few combinations occur, so few are looked up.
    bits = np.zeros(length, np.int64)
    for place, name in enumerate(names):
        bits |= given[name].astype(np.int64) << place
    kind = np.full(length, -1, np.int32)
    logged = frozenset(feed.signals)
    for code in np.unique(bits):
        here = frozenset(name for place, name in enumerate(names) if code >> place & 1)
        combination = _given(engine, here, logged)
        if combination:
            kind[bits == code] = feed.combinations.index(combination)
    rows = np.flatnonzero(kind >= 0)
    absent = np.full(length, np.nan, np.float32)
    columns = {name: values.get(name, absent)[rows] for name in feed.signals}
    return Chunk(columns, kind[rows]), rows


def _given(engine: Engine, here: frozenset[str], logged: frozenset[str]) -> tuple[str, ...]:
    """The signals that a row is judged by; none without a loss or a gradient norm.

    `eval_loss` is there at every row of a trace that has evaluations, NaN where there was none: to
    the engine, a run either has evaluations or has not.
    """
    if not here & set(ALWAYS):
        return ()
    there = [name for name in ALWAYS if name in here]
    if "update_norm" in engine.needs and "update_norm" in here:
        there.append("update_norm")
    if "eval_loss" in engine.needs and "eval_loss" in logged:
        there.append("eval_loss")
    return tuple(there)
