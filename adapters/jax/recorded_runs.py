"""The JAX backend of `healcore replay`, which judges recorded rows.

It runs one compiled loop on the CPU, because a GPU does not speed up a loop of scalars.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins.rows import (
    MOST_ROWS,
    DecisionColumns,
    SignalLayout,
    empty_columns,
    judge_row,
    rolled_back,
)


class JaxRowRunner:
    """Implements `RowRunner`. Pads chunks to one size, so that the loop is compiled once."""

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self._engine = engine
        self._branches = [functools.partial(self._judge, names) for names in layout.combinations]
        try:
            self._device = jax.devices("cpu")[0]
        except RuntimeError:  # JAX_PLATFORMS excludes the CPU
            self._device = jax.devices()[0]
        self._loop = jax.jit(self._judge_all)

    def start(self) -> EngineState:
        """The engine's initial state, on the CPU if JAX has a CPU backend."""
        return jax.device_put(self._engine.init(), self._device)

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """See `RowRunner.on_rollback`."""
        with jax.default_device(self._device):
            return rolled_back(self._engine, live, restored, xp=jnp)

    def run(
        self, state: EngineState, values: Mapping[str, np.ndarray], kind: np.ndarray
    ) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        count = len(kind)
        padding = (0, MOST_ROWS - count)
        padded = {name: np.pad(column, padding) for name, column in values.items()}
        with jax.default_device(self._device):
            state, found = self._loop(state, padded, np.pad(kind, padding), np.int32(count))
        return state, map_leaves(lambda column: np.asarray(column)[:count], found)

    def _judge(
        self, names: tuple[str, ...], state: EngineState, row: dict[str, Any]
    ) -> tuple[EngineState, DecisionColumns]:
        return judge_row(self._engine, state, Signals(**{n: row[n] for n in names}), xp=jnp)

    def _judge_all(self, state: EngineState, values: dict[str, Any], kind: Any, rows: Any) -> Any:
        def body(i: Any, carry: Any) -> tuple[EngineState, DecisionColumns]:
            state, found = carry
            row = {name: column[i] for name, column in values.items()}
            state, one_row = jax.lax.switch(kind[i], self._branches, state, row)
            return state, map_leaves(lambda all_, one: all_.at[i].set(one), found, one_row)

        # A scan would be compiled again for each length of a chunk.
        columns = map_leaves(jnp.asarray, empty_columns(MOST_ROWS))
        return jax.lax.fori_loop(0, rows, body, (state, columns))
