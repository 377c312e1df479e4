"""The adapter need "row_runner": runs recorded rows through the engine, for `healcore replay`.

An adapter provides a `RowRunner` class, called with an engine and a `SignalLayout`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core import step_record
from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord

MOST_ROWS = 4096
"""Most rows of one call of `RowRunner.run`."""

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


class SignalRows(NamedTuple):
    """Consecutive rows to be judged."""

    values: dict[str, np.ndarray]
    """float32 (n,) for each of the layout's signals; meaningless where the row does not have it."""
    kind: np.ndarray
    """int32 (n,): which of the layout's combinations the row has."""

    def part(self, rows: slice) -> SignalRows:
        """Some of the rows."""
        return SignalRows({name: each[rows] for name, each in self.values.items()}, self.kind[rows])


class RowRunner(Protocol):
    """One policy on one backend, for traces of one layout."""

    def start(self) -> Any:
        """The engine's first state, in the backend's arrays."""
        ...

    def on_rollback(self, live: Any, restored: Any) -> Any:
        """`rolled_back`, in the backend's arrays."""
        ...

    def run(self, state: Any, rows: SignalRows) -> tuple[Any, DecisionColumns]:
        """The state after at most `MOST_ROWS` rows, and their columns, NumPy arrays (n,)."""
        ...


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
    """`Engine.on_rollback` where the recorded run went back.

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
