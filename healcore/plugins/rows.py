"""Runs recorded rows through the engine on NumPy, JAX or torch, with the same bits.

An adapter's capability "row_runner" is a class, called with an engine and a `SignalLayout`.
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
"""Limit of the rows in one call of `RowRunner.run`."""

IMPORT_ROWS, LOOP_ROWS, COMBINATION_ROWS = 36_000, 45_000, 40_000
"""Costs of JAX, as the number of rows that NumPy judges in the same CPU time: the import, compiling
a policy's loop, and compiling one combination of signals in the loop. NumPy takes 0.12 ms per row
(`default`). Compiling took as long as 65,000 to 120,000 rows for one combination, for fast and slow
policies alike, and as long as 190,000 rows for three."""


DecisionColumns = tuple[Any, ...]
"""The numbers of a `StepRecord`, and a bool: a rollback was due, even if the budget was exhausted.
Scalars for one row, or arrays over rows."""


class SignalLayout(NamedTuple):
    """The signals in the rows of one trace for one policy; one loop is compiled per layout."""

    combinations: tuple[tuple[str, ...], ...]
    """The distinct sets of signals that rows have, in a fixed order."""

    @property
    def signals(self) -> tuple[str, ...]:
        """All signals that some row has, in the order of `Signals`' fields."""
        named = {name for combination in self.combinations for name in combination}
        return tuple(name for name in Signals._fields if name in named)


# -- the engine on one row -------------------------------------------------------------------------


def judge_row(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, DecisionColumns]:
    """Judges one row; returns the new state and the decision.

    A live run rolls back when ordered, so the order is subtracted from the budget here.
    """
    new, _ = engine.step(state, signals, xp=xp)
    if engine.mode != "observe":
        new = engine.subtract_rollback(new, xp=xp)
    incident = new.incident
    # `recovered` counts alarms since the incident's last rollback order, granted or denied. At an
    # alarm (quiet is 0) it is 0 only for a new order.
    due = incident.open & (incident.quiet == 0) & (incident.recovered == 0)
    return new, (*step_record.numbers(new), due)


def rolled_back(
    engine: Engine, live: EngineState, restored: EngineState, *, xp: Any
) -> EngineState:
    """`Engine.on_rollback` at a row where the recorded run rolled back.

    The budget stays: `judge_row` has already subtracted the order, and a restart costs nothing.
    """
    state = engine.on_rollback(live, restored, xp=xp)
    return state._replace(budget=state.budget._replace(recoveries=live.budget.recoveries))


def empty_columns(rows: int) -> DecisionColumns:
    """Allocates columns, NumPy arrays (rows,)."""
    ints = {"incident_open": bool, "skip": bool}
    kinds = [ints.get(name, np.int32) for name in step_record.FIELDS[: step_record.INTS]]
    kinds += [np.float32] * (len(step_record.FIELDS) - step_record.INTS)
    return tuple(np.zeros(rows, kind) for kind in (*kinds, bool))


def as_record(columns: DecisionColumns) -> tuple[StepRecord, Any]:
    """Splits columns into a record and the flag for a due rollback."""
    *numbers, due = columns
    return StepRecord(*numbers), due


# -- backends --------------------------------------------------------------------------------------


class RowRunner(Protocol):
    """Runs one policy on one backend, for traces of one layout."""

    def start(self) -> Any:
        """The engine's first state, in arrays of the backend."""
        ...

    def on_rollback(self, live: Any, restored: Any) -> Any:
        """`rolled_back`, in arrays of the backend."""
        ...

    def run(
        self, state: Any, values: Mapping[str, np.ndarray], kind: np.ndarray
    ) -> tuple[Any, DecisionColumns]:
        """Judges up to `MOST_ROWS` rows, given as a column (n,) per signal.

        `kind` (n,) is each row's index in `SignalLayout.combinations`. Returns the state after the
        rows, and the decisions as NumPy arrays (n,).
        """
        ...


def choose_backend(loops: Iterable[tuple[int, int]], policies: int = 1) -> str:
    """Chooses the backend that takes less CPU time for `policies` policies, which share no loop.

    Each of `loops` is a pair: the rows of all traces, and the number of combinations of signals.
    """
    saved = sum(rows - LOOP_ROWS - COMBINATION_ROWS * combinations for rows, combinations in loops)
    is_faster = saved * policies >= IMPORT_ROWS and importlib.util.find_spec("jax") is not None
    return "jax" if is_faster else "numpy"


@functools.lru_cache(maxsize=256)  # policies times layouts
def row_runner(config: EngineConfig, layout: SignalLayout, backend: str) -> RowRunner:
    """Returns a runner, cached by policy and layout so that each loop is compiled once.

    Raises MissingExtraError without the framework, and ValueError for an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "numpy":
        return NumpyRowRunner(Engine(config), layout)
    return adapter_registry.find(backend, "row_runner")(Engine(config), layout)


class NumpyRowRunner:
    """Runs row by row on NumPy scalars; each combination of signals is recorded once."""

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
        columns = empty_columns(len(kind))
        with np.errstate(all="ignore"):  # NumPy scalars warn, XLA and torch do not
            for row in range(len(kind)):
                names = self.layout.combinations[kind[row]]
                signals = Signals(**{name: values[name][row] for name in names})
                if names not in self._programs:
                    self._programs[names] = self._program(state, signals)
                state, row_columns = self._programs[names](state, signals)
                for column, value in zip(columns, row_columns, strict=True):
                    column[row] = value
        return state, columns

    def _program(self, state: EngineState, signals: Signals) -> Callable[..., Any]:
        return record(functools.partial(judge_row, self.engine), state, signals)
