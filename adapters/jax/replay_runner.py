"""The JAX backend of `healcore replay`: recorded rows through the engine in one compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
    """Runs chunks of rows, padded to one size, so that the loop is compiled once.

    On a CPU, because an accelerator does not speed up a loop of scalars.
    """

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self._engine = engine
        self._layout = layout
        self._device = _cpu()
        self._loop = jax.jit(_loop(engine, layout))

    def start(self) -> EngineState:
        """The engine's first state, on the CPU."""
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
        padded = {name: _padded(column) for name, column in values.items()}
        with jax.default_device(self._device):
            state, found = self._loop(state, padded, _padded(kind), np.int32(count))
        return state, map_leaves(lambda column: np.asarray(column)[:count], found)


def _loop(engine: Engine, layout: SignalLayout) -> Callable[..., Any]:

    def branch(
        names: tuple[str, ...], state: EngineState, row: dict[str, Any]
    ) -> tuple[EngineState, DecisionColumns]:
        signals = Signals(**{name: row[name] for name in names})
        return judge_row(engine, state, signals, xp=jnp)

    branches = [functools.partial(branch, names) for names in layout.combinations]

    def loop(state: EngineState, values: dict[str, Any], kind: Any, rows: Any) -> Any:
        def body(
            i: Any, carry: tuple[EngineState, DecisionColumns]
        ) -> tuple[EngineState, DecisionColumns]:
            state, found = carry
            row = {name: column[i] for name, column in values.items()}
            state, one_row = jax.lax.switch(kind[i], branches, state, row)
            return state, map_leaves(lambda all_, one: all_.at[i].set(one), found, one_row)

        empty = map_leaves(jnp.asarray, empty_columns(MOST_ROWS))
        # Not a scan, which would be compiled again for each length of a chunk.
        return jax.lax.fori_loop(0, rows, body, (state, empty))

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
