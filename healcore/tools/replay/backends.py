"""The rows of a trace as an engine takes them, and the backends that run it with the same bits."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Mapping

import numpy as np

from healcore.core import host
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.plugins import registry
from healcore.plugins.rows import (
    DecisionColumns,
    RowRunner,
    SignalLayout,
    SignalRows,
    empty_columns,
    judge_row,
)

BACKENDS = ("numpy", "jax", "torch")

JAX_STARTS, A_LOOP, A_COMBINATION = 4_000, 5_000, 4_500
"""What JAX takes before it judges, in rows that NumPy would have judged meanwhile: to be imported,
and to compile the loop of one policy, with a branch for each combination of signals. In CPU time,
one combination took 7,000 to 13,000 rows, of policies quick and slow alike (what is quick to judge
is quick to compile), and three took 21,000."""

ALWAYS = ("loss", "grad_norm")
"""Given wherever they were logged: what is not finite is never applied, whatever a policy reads."""


def choose_backend(loops: Iterable[tuple[int, int]], policies: int = 1) -> str:
    """The backend where the user names none.

    Args:
        loops: for each compiled loop of one policy, the rows of all traces that it would judge, and
            how many combinations of signals they have.
        policies: each has its own loops.
    """
    saved = sum(rows - A_LOOP - A_COMBINATION * combinations for rows, combinations in loops)
    worth = saved * policies >= JAX_STARTS and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


def row_runner(engine: Engine, layout: SignalLayout, backend: str) -> RowRunner:
    """A runner; the same one again for the same policy and layout, so that it is compiled once.

    Args:
        engine: the policy.
        layout: which signals, in which combinations.
        backend: of `BACKENDS`.

    Raises:
        healcore.extras.MissingExtraError: the backend's framework is not installed.
        ValueError: there is no such backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return _runner(engine.config, layout, backend)


@functools.lru_cache(maxsize=256)  # policies times layouts, each used for every trace
def _runner(config: EngineConfig, layout: SignalLayout, backend: str) -> RowRunner:
    engine = Engine(config)
    if backend == "numpy":
        return NumpyRowRunner(engine, layout)
    return registry.find(backend, "row_runner")(engine, layout)


class NumpyRowRunner:
    """NumPy scalars, row by row: nothing to compile."""

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self._engine = engine
        self._layout = layout

    def start(self) -> EngineState:
        """The engine's first state as NumPy scalars."""
        return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self._engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """`Engine.on_rollback`."""
        return self._engine.on_rollback(live, restored, xp=host)

    def run(self, state: EngineState, rows: SignalRows) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        found = empty_columns(len(rows.kind))
        combinations = self._layout.combinations
        with np.errstate(all="ignore"):  # float32 scalars warn where XLA and torch are silent
            for row in range(len(rows.kind)):
                names = combinations[rows.kind[row]]
                signals = Signals(**{name: rows.values[name][row] for name in names})
                state, row_columns = judge_row(self._engine, state, signals, xp=host)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value
        return state, found


def layout_of(engine: Engine, combinations: Iterable[frozenset[str]]) -> SignalLayout:
    """What an engine is given of a trace.

    Args:
        engine: the policy.
        combinations: sets of signals that rows of the trace log together.
    """
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
    """Rows of a trace as an engine takes them.

    Args:
        layout: from `layout_of` of the whole trace.
        engine: the policy.
        values: float32 (n,) by signal.
        given: bool (n,) by signal: logged in this row.

    Returns:
        The rows that are judged, and their places among all of them, int (m,).
    """
    names = [name for name in layout.signals if name in given]
    length = len(next(iter(given.values()), ()))
    # One bit for each signal; few combinations occur, so few are looked up.
    bits = np.zeros(length, np.int64)
    for place, name in enumerate(names):
        bits |= given[name].astype(np.int64) << place
    kind = np.full(length, -1, np.int32)
    logged = frozenset(layout.signals)
    for code in np.unique(bits):
        here = frozenset(name for place, name in enumerate(names) if code >> place & 1)
        combination = _given(engine, here, logged)
        if combination:
            kind[bits == code] = layout.combinations.index(combination)
    rows = np.flatnonzero(kind >= 0)
    absent = np.full(length, np.nan, np.float32)
    columns = {name: values.get(name, absent)[rows] for name in layout.signals}
    return SignalRows(columns, kind[rows]), rows


def _given(engine: Engine, here: frozenset[str], logged: frozenset[str]) -> tuple[str, ...]:
    """The signals that a row is judged by; none without a loss or a gradient norm.

    `update_norm` and `eval_loss` only where the policy reads them, as the adapters do. `eval_loss`
    is there at every row of a trace that has evaluations, NaN where there was none: to the engine,
    a run either has evaluations or has not.
    """
    if not here & set(ALWAYS):
        return ()
    there = [name for name in ALWAYS if name in here]
    if "update_norm" in engine.needs and "update_norm" in here:
        there.append("update_norm")
    if "eval_loss" in engine.needs and "eval_loss" in logged:
        there.append("eval_loss")
    return tuple(there)
