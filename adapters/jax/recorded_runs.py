"""The JAX backends of `healcore replay` and `healcore sweep`, which judge recorded rows.

Each runs one compiled loop on the CPU, because a GPU does not speed up a loop of scalars.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.jax import namespace
from healcore.plugins.rows import (
    MOST_ROWS,
    DecisionColumns,
    SignalLayout,
    empty_columns,
    judge_row,
    rolled_back,
)
from healcore.plugins.sweep import (
    WORD,
    PackedRows,
    PackedSeries,
    Place,
    VariantDecision,
    step,
    variants_of,
)

try:
    from jax.experimental.xla_metadata import set_xla_metadata
except ImportError:  # experimental: some releases lack it
    set_xla_metadata = None

_ONE_KERNEL = {"inlineable": "false", "xla_cpu_small_call": "true"}
"""Tells XLA to compile each call as one kernel. Only for healcore's own programs: with such a call
in a user's `while_loop`, or on a sharded array, XLA aborts the process."""
_WIDE_VECTORS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
"""A compiler option; the default is 256 bits. Results are bit-identical (docs/parity.md)."""


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


class JaxSweepScan:
    """Implements `SweepScan`: judges all variants of a policy in one vmapped scan.

    `places` are the positions of the varied numbers in `config`. Thread-safe, so that two threads
    can use two cores. Raises RuntimeError without a CPU backend.

    Wide vectors and a loop compiled as one kernel make the scan four times as fast. By default, XLA
    uses one kernel only for loops with tiny buffers (xla_cpu_small_while_loop_byte_threshold).
    """

    def __init__(self, config: EngineConfig, places: tuple[Place, ...]) -> None:
        self._config, self._places = config, places
        self._device = jax.devices("cpu")[0]
        self._programs: dict[tuple[SignalLayout, int, int], Callable[..., Any]] = {}
        self._compiling = threading.Lock()

    def run(
        self, numbers: tuple[np.ndarray, ...], packed: PackedSeries
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `SweepScan.run`."""
        shape = (packed.layout, len(numbers[0]), len(packed.rows.start))
        with self._compiling:
            if shape not in self._programs:
                self._programs[shape] = self._compiled(numbers, packed)
        words, skipped, recovered = self._programs[shape](numbers, packed.rows)
        return np.asarray(words), np.asarray(skipped), np.asarray(recovered)

    def _compiled(self, numbers: tuple[np.ndarray, ...], packed: PackedSeries) -> Any:
        one = functools.partial(self._scan, packed.layout)
        scan = jax.jit(jax.vmap(one, in_axes=(0, None), out_axes=1))

        def with_hint(*arguments: Any) -> Any:
            if set_xla_metadata is None:
                return scan(*arguments)
            with set_xla_metadata(**_ONE_KERNEL):
                return scan(*arguments)

        with jax.default_device(self._device):
            lowered = jax.jit(with_hint).lower(numbers, packed.rows)
            try:
                return lowered.compile(compiler_options=_WIDE_VECTORS)
            except jax.errors.JaxRuntimeError:  # this release of XLA lacks the option
                return lowered.compile()

    def _scan(self, layout: SignalLayout, numbers: tuple[Any, ...], rows: PackedRows) -> Any:
        """Judges all groups with one variant; returns order bits, skips and recoveries per group.

        `vmap` does not batch values that are the same for all variants, such as the signals.
        """
        engine = variants_of(self._config, self._places, numbers)
        new_state = map_leaves(jnp.asarray, engine.init())

        def one(
            i: Any, names: tuple[str, ...], state: EngineState
        ) -> tuple[EngineState, VariantDecision]:
            signals = Signals(**{n: rows.signals[i, layout.signals.index(n)] for n in names})
            return step(engine, state, signals, xp=namespace)

        def row(i: Any, carry: Any) -> Any:
            state, skipped, recovered, word = carry
            state = _chosen(rows.resumed[i], rolled_back(engine, state, state, xp=namespace), state)
            cases = [functools.partial(one, i, names) for names in layout.combinations]
            state, verdict = jax.lax.switch(rows.kind[i], cases, state)
            bit = verdict.order.astype(jnp.uint32) << (i % WORD).astype(jnp.uint32)
            skipped = skipped + (verdict.skip & rows.own[i]).astype(jnp.int32)
            recovered = recovered + (verdict.first & rows.own[i]).astype(jnp.int32)
            return state, skipped, recovered, word | bit

        def group(state: EngineState, part: tuple[Any, Any, Any]) -> Any:
            start, stop, fresh = part
            carry = (_chosen(fresh, new_state, state), jnp.int32(0), jnp.int32(0), jnp.uint32(0))
            # One iteration per row of the group, so padding costs nothing.
            state, skipped, recovered, word = jax.lax.fori_loop(start, stop, row, carry)
            return state, (word, skipped, recovered)

        return jax.lax.scan(group, new_state, (rows.start, rows.stop, rows.fresh))[1]


def _chosen(condition: Any, new: EngineState, old: EngineState) -> EngineState:
    """Selects `new` where the condition holds, except leaves that both states share."""
    return map_leaves(lambda a, b: b if a is b else jnp.where(condition, a, b), new, old)
