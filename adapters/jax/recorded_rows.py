"""The JAX backends of `healcore replay` and `healcore sweep`: loops over rows on the CPU."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

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

_OPTIONS: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
_ATTRIBUTES = {"xla_cpu_small_call": "true", "inlineable": "false"}


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


class JaxSweepScan:
    """Runs thousands of variants of one policy in one vmapped scan, for `healcore sweep`.

    Thread-safe: two threads keep two cores busy. `places` are the positions of the varied numbers
    in `config`. Raises RuntimeError without a CPU backend.

    Two settings of XLA make it four times as fast on a CPU. They apply to this program only, and do
    not reorder or contract arithmetic: every backend gets the same results bit for bit
    (docs/parity.md).

    * The loop is compiled to one LLVM function, not to a list of kernels called once per step. By
      default XLA does so only for loops with tiny buffers
      (xla_cpu_small_while_loop_byte_threshold). An XLA that does not know the attribute ignores it.
    * Vectors of 512 bits, where the machine has them. LLVM's default is 256.
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

        def with_attributes(*arguments: Any) -> Any:
            with set_xla_metadata(**_ATTRIBUTES):
                return scan(*arguments)

        with jax.default_device(self._device):
            lowered = jax.jit(with_attributes).lower(numbers, packed.rows)
            try:
                return lowered.compile(compiler_options=_OPTIONS)
            except jax.errors.JaxRuntimeError:  # an XLA without this option
                return lowered.compile()

    def _scan(self, layout: SignalLayout, numbers: tuple[Any, ...], rows: PackedRows) -> Any:
        """One variant over all groups: order bits, skips and recoveries of each group.

        Vmap does not batch what is the same for all variants, the signals for example.
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
            # As many iterations as the group has rows: padding costs nothing.
            state, skipped, recovered, word = jax.lax.fori_loop(start, stop, row, carry)
            return state, (word, skipped, recovered)

        return jax.lax.scan(group, new_state, (rows.start, rows.stop, rows.fresh))[1]


def _chosen(condition: Any, new: EngineState, old: EngineState) -> EngineState:
    """`new` where the condition holds. What is in both is not selected."""
    return map_leaves(lambda a, b: b if a is b else jnp.where(condition, a, b), new, old)
