"""One row through the engine, and what a replay keeps of it. Pure, in every backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from healcore.core import step_record
from healcore.core.engine import Engine, EngineState
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord

Columns = tuple[Any, ...]
"""The numbers of a `StepRecord`, and whether a rollback was due (whether or not the budget still
allowed it): of one row, or arrays over rows."""


def judge(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, Columns]:
    """The state after one row, and what was decided about it.

    Args:
        engine: the policy.
        state: before the row.
        signals: what the row logged.
        xp: the array namespace.
    """
    new, _ = engine.step(state, signals, xp=xp)
    after = new.incident
    # The incident counts alarms since its last order of a rollback, from 0, whether or not the
    # budget still allowed it. At a step in alarm (quiet is 0) that is 0 only for a new order.
    due = after.open & (after.quiet == 0) & (after.recovered == 0)
    return new, (*step_record.numbers(new), due)


def columns(rows: int) -> Columns:
    """Columns of so many rows, to be written over: NumPy arrays (rows,)."""
    ints = {"incident_open": bool, "skip": bool}
    kinds = [ints.get(name, np.int32) for name in step_record.FIELDS[: step_record.INTS]]
    kinds += [np.float32] * (len(step_record.FIELDS) - step_record.INTS)
    return tuple(np.zeros(rows, kind) for kind in (*kinds, bool))


def by_name(found: Columns) -> tuple[StepRecord, Any]:
    """The record, and where a rollback was due."""
    *numbers, due = found
    return StepRecord(*numbers), due
