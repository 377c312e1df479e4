"""Runs the rows of a trace through the engine of a policy.

The engine's step is recorded as a loop, once for each set of signals that rows log together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from healcore.core.decision import Action
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.numerics import map_leaves
from healcore.core.recorded import record_loop
from healcore.core.signals import Signals
from healcore.tools.traces.columns import JUDGED, Rows, Trace

_DECISION = np.dtype(
    [
        *(("cause", "i4"), ("action", "i4"), ("skip", "?"), ("grad_scale", "f4")),
        *(("lr_scale", "f4"), ("threshold", "f4"), ("z", "f4"), ("z_loss", "f4")),
        *(("incident", "i4"), ("incident_open", "?"), ("due", "?")),
    ]
)
"""What the engine returns for a row: fields of `StepRecord`, the incident, a due rollback."""

_JUDGED = np.dtype(
    [
        *(("index", "i8"), ("step", "f8"), ("attempt", "i8"), *_DECISION.descr),
        *(("repeated", "?"), ("spent", "?"), ("clipped", "?"), ("ends_run", "?")),
    ]
)
"""A judged row.

- `index`, `step`, `attempt`: the row of the trace.
- `action`: the orders, with ROLLBACK at each row where a rollback is due, even if the budget
  denies it. Of the denied rollbacks of an incident only the first is due.
- `repeated`: a rollback was due earlier in the same incident.
- `spent`: a rollback is due, but the budget denies it.
- `clipped`: the gradient is scaled down, and the step is not skipped.
- `ends_run`: a live run ends here, even if all earlier rollbacks helped.
"""


def judge_trace(engine: Engine, trace: Trace) -> np.recarray:
    """Judges the rows of a trace that log a loss or a gradient norm. Returns `_JUDGED` rows (n,).

    As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
    budgets and LR multiplier. An attempt from scratch is a rollback to the first state.
    """
    index, combinations, kind = _choose_signals(engine, trace.rows)
    rows = np.zeros(len(index), _JUDGED).view(np.recarray)
    rows.index, rows.step = index, trace.rows.step[index]
    rows.attempt = trace.rows.attempt[index]
    loops = [_recorded_loop(engine.config, names) for names in combinations]
    inputs = [[trace.rows.values[name][index] for name in names] for names in combinations]

    # Numbers of judged rows before each attempt, and up to the row that it resumes after.
    begins = np.searchsorted(rows.attempt, np.arange(len(trace.attempts))).tolist()
    last = [-1 if each.resumes_after is None else each.resumes_after for each in trace.attempts]
    resumes = dict(zip(begins, np.searchsorted(index, last, side="right").tolist(), strict=True))
    changes = (1 + np.flatnonzero(np.diff(kind))).tolist()
    state = _first_state(engine)
    saved = {0: state}  # by number of judged rows
    with np.errstate(all="ignore"):  # NumPy scalars warn
        for start, stop in pairwise(sorted({0, *begins, *resumes.values(), *changes, len(index)})):
            if start and start in resumes:
                state = _rolled_back(engine, state, saved[resumes[start]])
            columns = [column[start:stop] for column in inputs[kind[start]]]
            state, decided = loops[kind[start]](state, zip(*columns, strict=True))
            decisions = np.fromiter(decided, _DECISION, stop - start)
            for name in _DECISION.names or ():
                rows[name][start:stop] = decisions[name]
            saved[stop] = state
    _find_rollbacks(rows)
    return rows


def _find_rollbacks(rows: np.recarray) -> None:
    """Sets the fields that depend on the earlier rollbacks of an incident."""
    incident = np.flatnonzero(
        (np.diff(rows.attempt, prepend=-1) != 0) | (np.diff(rows.incident, prepend=-1) != 0)
    )
    denied = rows.due & (rows.action & int(Action.ROLLBACK) == 0)
    rows.repeated = _count_before(rows.due, incident) > 0
    # The engine orders STOP if it denies a due rollback. A rule may also order STOP.
    rows.ends_run = (rows.action & int(Action.STOP) != 0) & ~(rows.repeated & rows.due)
    rows.spent = denied & (_count_before(denied, incident) == 0)
    rows.due &= ~denied | rows.spent
    rows.action |= np.where(rows.due, int(Action.ROLLBACK), 0).astype(np.int32)
    rows.clipped = (rows.grad_scale < 1) & ~rows.skip


def _count_before(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Counts the flags before each row, int (n,), since the last of the rows `starts`."""
    before = np.cumsum(flags) - flags
    return before - np.repeat(before[starts], np.diff(starts, append=len(flags)))


def _choose_signals(
    engine: Engine, rows: Rows
) -> tuple[np.ndarray, list[tuple[str, ...]], np.ndarray]:
    """Chooses the rows with a loss or a gradient norm, and the signals of each for the engine.

    `eval_loss` is passed only if the policy reads it, as in the adapters. In a trace with
    evaluations every row has `eval_loss`, which is NaN without an evaluation, because the signals
    of an engine are fixed for a run. Returns the rows, int (n,), the distinct sets of
    signals, and the place of each row's set, int (n,).
    """
    names = [name for name in JUDGED if name in rows.logged]
    has_evaluations = "eval_loss" in engine.needs and rows.logged.get("eval_loss", np.False_).any()
    logged = np.array([rows.logged[name] for name in names])
    index = np.flatnonzero(logged.any(axis=0))
    found, kind = np.unique(logged[:, index], axis=1, return_inverse=True)
    more = ("eval_loss",) * bool(has_evaluations)
    combinations = [
        (*(name for name, has in zip(names, column, strict=True) if has), *more)
        for column in found.T.tolist()
    ]
    return index, combinations, kind


# -- the engine on one row -------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _recorded_loop(config: EngineConfig, names: tuple[str, ...]) -> Callable[..., Any]:
    """Records the loop over rows that log these signals, once for a policy."""
    engine = Engine(config)
    row = tuple(np.float32(0) for _ in names)
    return record_loop(functools.partial(_judge_row, engine, names), _first_state(engine), row)


def _first_state(engine: Engine) -> EngineState:
    """The engine's first state as NumPy scalars."""
    return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, engine.init())


def _judge_row(
    engine: Engine, names: tuple[str, ...], state: EngineState, values: tuple[Any, ...], *, xp: Any
) -> tuple[EngineState, tuple[Any, ...]]:
    """Judges one row. Returns the new state, and the fields of `_DECISION`.

    A live run rolls back when ordered, so the order is subtracted from the budget here.
    """
    new, _ = engine.step(state, Signals(**dict(zip(names, values, strict=True))), xp=xp)
    if engine.mode != "observe":
        new = engine.subtract_rollback(new, xp=xp)
    incident, last = new.incident, new.last
    # `recovered` counts alarms since the incident's last rollback order, granted or denied. At an
    # alarm (quiet is 0) it is 0 only for a new order.
    due = incident.open & (incident.quiet == 0) & (incident.recovered == 0)
    decision = last.decision
    return new, (
        *(decision.cause, decision.action, decision.skip, decision.grad_scale, decision.lr_scale),
        *(last.threshold, last.z, last.z_loss, incident.number, incident.open, due),
    )


def _rolled_back(engine: Engine, live: EngineState, restored: EngineState) -> EngineState:
    """`Engine.on_rollback` at a row where the recorded run rolled back.

    The budget stays: `_judge_row` has already subtracted the order, and a restart costs nothing.
    """
    state = map_leaves(lambda leaf: leaf[()], engine.on_rollback(live, restored, xp=np))
    return state._replace(budget=state.budget._replace(recoveries=live.budget.recoveries))
