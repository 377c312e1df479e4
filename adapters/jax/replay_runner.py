"""The JAX backend of `healcore replay`: recorded rows through the engine in one compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.tools.replay.feeding import Chunk, Feed
from healcore.tools.replay.judging import Columns, columns, judge
from healcore.tools.replay.runners import MOST_ROWS


class JaxRunner:
    """Runs chunks of rows. Every chunk is padded to one size, so that the loop is compiled once.

    On a CPU: each row depends on the one before, and an accelerator does not speed up a loop of
    scalars.
    """

    def __init__(self, engine: Engine, feed: Feed) -> None:
        self._engine = engine
        self._feed = feed
        self._device = _cpu()
        self._loop = jax.jit(_loop(engine, feed))

    def start(self) -> EngineState:
        """The engine's first state, on the CPU."""
        return jax.device_put(self._engine.init(), self._device)

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """`Engine.on_rollback`."""
        with jax.default_device(self._device):
            return self._engine.on_rollback(live, restored, xp=jnp)

    def run(self, state: EngineState, chunk: Chunk) -> tuple[EngineState, Columns]:
        """The state after the chunk, and its columns, NumPy arrays (n,)."""
        rows = len(chunk.kind)
        kind = _padded(chunk.kind)
        values = {name: _padded(column) for name, column in chunk.values.items()}
        with jax.default_device(self._device):
            state, found = self._loop(state, values, kind, np.int32(rows))
        return state, map_leaves(lambda column: np.asarray(column)[:rows], found)


make = JaxRunner
"""What `healcore.tools.replay.runners` asks an adapter for."""


def _loop(engine: Engine, feed: Feed) -> Callable[..., Any]:
    """The function that is compiled: (state, values, kind, rows) -> (state, columns)."""

    def branch_for(names: tuple[str, ...]) -> Callable[..., Any]:
        def branch(state: EngineState, row: dict[str, Any]) -> tuple[EngineState, Columns]:
            signals = Signals(**{name: row[name] for name in names})
            return judge(engine, state, signals, xp=jnp)

        return branch

    branches = [branch_for(names) for names in feed.combinations]

    def loop(state: EngineState, values: dict[str, Any], kind: Any, rows: Any) -> Any:
        def body(i: Any, carry: tuple[EngineState, Columns]) -> tuple[EngineState, Columns]:
            state, found = carry
            row = {name: column[i] for name, column in values.items()}
            # `switch` with one branch calls it without a conditional.
            state, one_row = jax.lax.switch(kind[i], branches, state, row)
            return state, map_leaves(lambda all_, one: all_.at[i].set(one), found, one_row)

        # A loop up to `rows`, not a scan: chunks differ in length (the last one, and the last of
        # each attempt), and must not be compiled again for that.
        return jax.lax.fori_loop(
            0, rows, body, (state, map_leaves(jnp.asarray, columns(MOST_ROWS)))
        )

    return loop


def _padded(column: np.ndarray) -> np.ndarray:
    padded = np.zeros(MOST_ROWS, column.dtype)
    padded[: len(column)] = column
    return padded


def _cpu() -> Any:
    """A CPU device, or JAX's default where JAX_PLATFORMS excludes the CPU."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]
