"""The engine over a chunk of rows, in each backend. What comes out is the same, bit for bit."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from healcore.core import host
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.extras import require
from healcore.tools.replay.feeding import Chunk, Feed
from healcore.tools.replay.judging import Columns, columns, judge

BACKENDS = ("numpy", "jax", "torch")

JAX_STARTS, A_LOOP, A_COMBINATION = 4_000, 5_000, 4_500
"""What JAX takes before it judges, in rows that NumPy would have judged meanwhile: to be imported,
and to compile the loop of one policy, with a branch for each combination of signals. In CPU time,
one combination took 7,000 to 13,000 rows, of policies quick and slow alike (what is quick to judge
is quick to compile), and three took 21,000."""

MOST_ROWS = 4096
"""Rows of a chunk at most."""


class Runner(Protocol):
    """One policy on one backend, for traces of one feed."""

    def start(self) -> Any:
        """The engine's first state, in the backend's arrays."""
        ...

    def on_rollback(self, live: Any, restored: Any) -> Any:
        """`Engine.on_rollback`."""
        ...

    def run(self, state: Any, chunk: Chunk) -> tuple[Any, Columns]:
        """The state after the chunk of at most `MOST_ROWS`, and its columns, NumPy arrays (n,)."""
        ...


def chosen(loops: Iterable[tuple[int, int]], policies: int = 1) -> str:
    """The backend where the user names none.

    Args:
        loops: for each compiled loop of one policy, the rows of all traces that it would judge, and
            how many combinations of signals they have.
        policies: each has its own loops.
    """
    saved = sum(rows - A_LOOP - A_COMBINATION * combinations for rows, combinations in loops)
    worth = saved * policies >= JAX_STARTS and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


def runner(engine: Engine, feed: Feed, backend: str) -> Runner:
    """A runner; the same one again for the same policy and feed, so that it is compiled once.

    Args:
        engine: the policy.
        feed: which signals, in which combinations.
        backend: of `BACKENDS`.

    Raises:
        healcore.extras.MissingExtraError: the backend's framework is not installed.
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return _runner(engine.config, feed, backend)


@functools.lru_cache(maxsize=256)  # policies times feeds, each used for every trace
def _runner(config: EngineConfig, feed: Feed, backend: str) -> Runner:
    engine = Engine(config)
    if backend == "numpy":
        return HostRunner(engine, feed)
    require(backend, backend)
    # By name, at run time: healcore itself imports no framework.
    return importlib.import_module(f"healcore.{backend}.replay_runner").make(engine, feed)


class HostRunner:
    """NumPy scalars, row by row: nothing to compile."""

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self._engine = engine
        self._feed = feed

    def start(self) -> EngineState:
        """The engine's first state as NumPy scalars."""
        return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self._engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """`Engine.on_rollback`."""
        return self._engine.on_rollback(live, restored, xp=host)

    def run(self, state: EngineState, chunk: Chunk) -> tuple[EngineState, Columns]:
        """See `Runner.run`."""
        found = columns(len(chunk.kind))
        combinations = self._feed.combinations
        with np.errstate(all="ignore"):  # float32 scalars warn where XLA and torch are silent
            for row in range(len(chunk.kind)):
                names = combinations[chunk.kind[row]]
                signals = Signals(**{name: chunk.values[name][row] for name in names})
                state, row_columns = judge(self._engine, state, signals, xp=host)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value
        return state, found
