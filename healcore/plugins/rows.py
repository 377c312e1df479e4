"""Runs recorded rows through the engine on NumPy, JAX or torch, with the same bits.

An adapter provides a `RowRunner` class as "row_runner", called with an engine and a `SignalLayout`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore import adapter_registry
from healcore.core import host, step_record
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord
from healcore.core.tree import map_leaves

BACKENDS = ("numpy", "jax", "torch")

MOST_ROWS = 4096
"""Most rows of one call of `RowRunner.run`."""

JAX_STARTS, A_LOOP, A_COMBINATION = 36_000, 45_000, 40_000
"""JAX's start-up costs, in rows that NumPy judges in the same time: the import, and compiling one
policy's loop, with a branch per combination of signals. In CPU time, of which a row takes NumPy
0.12 ms (`default`): compiling one combination took the time of 65,000 to 120,000 rows, for fast and
slow policies alike; compiling three combinations took the time of 190,000 rows."""


DecisionColumns = tuple[Any, ...]
"""The numbers of a `StepRecord`, and whether a rollback was due (whether or not the budget still
allowed it): of one row, or arrays over rows."""


class SignalLayout(NamedTuple):
    """The signals of one trace that one policy is given; a compiled loop belongs to it."""

    combinations: tuple[tuple[str, ...], ...]
    """Signals that rows have together, every combination once, in a fixed order."""

    @property
    def signals(self) -> tuple[str, ...]:
        """Every signal that some row is given, in the order of `Signals`' fields."""
        named = {name for combination in self.combinations for name in combination}
        return tuple(name for name in Signals._fields if name in named)


# -- the engine on one row -------------------------------------------------------------------------


def judge_row(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, DecisionColumns]:
    """The engine's state after one row, and the decision about the row.

    A live run carries out a rollback that is ordered, so the rollback costs its budget here.
    """
    new, _ = engine.step(state, signals, xp=xp)
    if engine.mode != "observe":
        new = engine.charged(new, xp=xp)
    after = new.incident
    # `recovered` counts alarms since the incident's last order of a rollback, from 0, whether or
    # not the budget still allowed it. At a step in alarm (quiet is 0) it is 0 only for a new order.
    due = after.open & (after.quiet == 0) & (after.recovered == 0)
    return new, (*step_record.numbers(new), due)


def rolled_back(
    engine: Engine, live: EngineState, restored: EngineState, *, xp: Any
) -> EngineState:
    """`Engine.on_rollback` where the recorded run rolled back.

    The budget stays: `judge_row` has subtracted the order, and a restart costs nothing.
    """
    state = engine.on_rollback(live, restored, xp=xp)
    return state._replace(budget=state.budget._replace(recoveries=live.budget.recoveries))


def empty_columns(rows: int) -> DecisionColumns:
    """Columns to be overwritten: NumPy arrays (rows,)."""
    ints = {"incident_open": bool, "skip": bool}
    kinds = [ints.get(name, np.int32) for name in step_record.FIELDS[: step_record.INTS]]
    kinds += [np.float32] * (len(step_record.FIELDS) - step_record.INTS)
    return tuple(np.zeros(rows, kind) for kind in (*kinds, bool))


def as_record(columns: DecisionColumns) -> tuple[StepRecord, Any]:
    """The record, and where a rollback was due."""
    *numbers, due = columns
    return StepRecord(*numbers), due


# -- backends --------------------------------------------------------------------------------------


class RowRunner(Protocol):
    """One policy on one backend, for traces of one layout."""

    def start(self) -> Any:
        """The engine's first state, in the backend's arrays."""
        ...

    def on_rollback(self, live: Any, restored: Any) -> Any:
        """`rolled_back`, in the backend's arrays."""
        ...

    def run(
        self, state: Any, values: Mapping[str, np.ndarray], kind: np.ndarray
    ) -> tuple[Any, DecisionColumns]:
        """Judges at most `MOST_ROWS` rows.

        Returns the state after them, and the columns, NumPy arrays (n,).
        """
        ...


def choose_backend(loops: Iterable[tuple[int, int]], policies: int = 1) -> str:
    """The default backend for `policies` policies, each of which compiles its own loops.

    Each of `loops` has the rows of all traces that one loop would judge, and the number of its
    combinations of signals.
    """
    saved = sum(rows - A_LOOP - A_COMBINATION * combinations for rows, combinations in loops)
    worth = saved * policies >= JAX_STARTS and importlib.util.find_spec("jax") is not None
    return "jax" if worth else "numpy"


@functools.lru_cache(maxsize=256)  # policies times layouts, each used for every trace
def row_runner(config: EngineConfig, layout: SignalLayout, backend: str) -> RowRunner:
    """A runner of `BACKENDS`, cached by policy and layout so that each is compiled once.

    Raises MissingExtraError if the framework is not installed, ValueError for another backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "numpy":
        return NumpyRowRunner(Engine(config), layout)
    return adapter_registry.find(backend, "row_runner")(Engine(config), layout)


class NumpyRowRunner:
    """Runs NumPy scalars row by row; each combination of signals is recorded once."""

    def __init__(self, engine: Engine, layout: SignalLayout) -> None:
        self.engine = engine
        self.layout = layout
        self._programs: dict[tuple[str, ...], Callable[..., Any]] = {}

    def start(self) -> EngineState:
        """The engine's first state as NumPy scalars."""
        return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, self.engine.init())

    def on_rollback(self, live: EngineState, restored: EngineState) -> EngineState:
        """See `RowRunner.on_rollback`."""
        return rolled_back(self.engine, live, restored, xp=host)

    def run(
        self, state: EngineState, values: Mapping[str, Any], kind: np.ndarray
    ) -> tuple[EngineState, DecisionColumns]:
        """See `RowRunner.run`."""
        found = empty_columns(len(kind))
        with np.errstate(all="ignore"):  # float32 scalars warn where XLA and torch are silent
            for row in range(len(kind)):
                names = self.layout.combinations[kind[row]]
                signals = Signals(**{name: values[name][row] for name in names})
                if names not in self._programs:
                    self._programs[names] = self._program(state, signals)
                state, row_columns = self._programs[names](state, signals)
                for column, value in zip(found, row_columns, strict=True):
                    column[row] = value
        return state, found

    def _program(self, state: EngineState, signals: Signals) -> Callable[..., Any]:
        return record(functools.partial(judge_row, self.engine), state, signals)
