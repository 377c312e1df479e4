"""Turns rows of a trace into an engine's input, and runs it on NumPy, JAX or torch, bit for bit."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from healcore import adapter_registry
from healcore.core import host
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins.rows import (
    DecisionColumns,
    RowRunner,
    SignalLayout,
    SignalRows,
    empty_columns,
    judge_row,
    rolled_back,
)
from healcore.tools.traces.trace import by_signals

BACKENDS = ("numpy", "jax", "torch")

JAX_STARTS, A_LOOP, A_COMBINATION = 36_000, 45_000, 40_000
"""JAX's start-up costs, in rows that NumPy judges in the same time: the import, and compiling one
policy's loop, with a branch per combination of signals. In CPU time, of which a row takes NumPy
0.12 ms (`default`): one combination took that of 65,000 to 120,000 rows, for fast and slow policies
alike (a policy that judges fast compiles fast); three took that of 190,000."""

ALWAYS = ("loss", "grad_norm")
"""Given wherever logged: no update with a non-finite value is applied, whatever a policy reads."""


def choose_backend(loops: Iterable[tuple[int, int]], policies: int = 1) -> str:
    """The default backend for `policies` policies, each of which compiles its own loops.

    Each of `loops` has the rows of all traces that one loop would judge, and the number of its
    combinations of signals.
    """
    saved = sum(rows - A_LOOP - A_COMBINATION * combinations for rows, combinations in loops)
    worth = saved * policies >= JAX_STARTS and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


def row_runner(engine: Engine, layout: SignalLayout, backend: str) -> RowRunner:
    """A runner of `BACKENDS`, cached by policy and layout so that each is compiled once.

    Raises MissingExtraError if the framework is not installed, ValueError for another backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return _runner(engine.config, layout, backend)


@functools.lru_cache(maxsize=256)  # policies times layouts, each used for every trace
def _runner(config: EngineConfig, layout: SignalLayout, backend: str) -> RowRunner:
    engine = Engine(config)
    if backend == "numpy":
        return NumpyRowRunner(engine, layout)
    return adapter_registry.find(backend, "row_runner")(engine, layout)


class NumpyRowRunner:
    """Runs NumPy scalars row by row; each combination of signals is recorded once."""

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self._engine = engine
        self._layout = layout
        self._programs: dict[tuple[str, ...], Callable[..., Any]] = {}

    def start(self) -> EngineState:
        """The engine's first state as NumPy scalars."""
        return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self._engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """See `RowRunner.on_rollback`."""
        return rolled_back(self._engine, live, restored, xp=host)

    def run(self, state: EngineState, rows: SignalRows) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        found = empty_columns(len(rows.kind))
        combinations = self._layout.combinations
        with np.errstate(all="ignore"):  # float32 scalars warn where XLA and torch are silent
            for row in range(len(rows.kind)):
                names = combinations[rows.kind[row]]
                signals = Signals(**{name: rows.values[name][row] for name in names})
                if names not in self._programs:
                    judge = functools.partial(judge_row, self._engine)
                    self._programs[names] = record(judge, state, signals)
                state, row_columns = self._programs[names](state, signals)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value
        return state, found


def layout_of(engine: Engine, combinations: Iterable[frozenset[str]]) -> SignalLayout:
    """The signals that an engine is given, from the sets that rows of the trace log together."""
    combinations = list(combinations)
    logged = frozenset().union(*combinations)
    found = {_given(engine, each, logged) for each in combinations}
    return SignalLayout(tuple(sorted(found - {()})))


def rows_of(
    layout: SignalLayout,
    engine: Engine,
    values: Mapping[str, np.ndarray],
    given: Mapping[str, np.ndarray],
) -> tuple[SignalRows, np.ndarray]:
    """Turns rows of a trace into an engine's input; `layout` is of the whole trace.

    `values` are float32 (n,) and `given` bool (n,) by signal. Returns the judged rows, and their
    places among all rows, int (m,).
    """
    length = len(next(iter(given.values()), ()))
    kind = np.full(length, -1, np.int32)
    logged = frozenset(layout.signals)
    for here, those in by_signals(given, layout.signals):
        combination = _given(engine, here, logged)
        if combination:
            kind[those] = layout.combinations.index(combination)
    rows = np.flatnonzero(kind >= 0)
    absent = np.full(length, np.nan, np.float32)
    columns = {name: values.get(name, absent)[rows] for name in layout.signals}
    return SignalRows(columns, kind[rows]), rows


def _given(engine: Engine, here: frozenset[str], logged: frozenset[str]) -> tuple[str, ...]:
    """The signals that a row is judged by; none without a loss or a gradient norm.

    `update_norm` and `eval_loss` are given only if the policy reads them, as in the adapters. If a
    trace has evaluations, every row has `eval_loss`, NaN where there was none: the engine sees a
    run with evaluations or one without.
    """
    if not here & set(ALWAYS):
        return ()
    there = [name for name in ALWAYS if name in here]
    if "update_norm" in engine.needs and "update_norm" in here:
        there.append("update_norm")
    if "eval_loss" in engine.needs and "eval_loss" in logged:
        there.append("eval_loss")
    return tuple(there)
