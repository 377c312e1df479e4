"""Runs the rows of a trace through the engine of a policy.

The engine's step is recorded as a loop, once for each set of signals that rows log together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.recorded import record_loop
from healcore.core.signals import Signals
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action
from healcore.tools.traces import Rows, Trace

ALWAYS_PASSED = ("loss", "grad_norm")
"""Signals that every policy gets, because no update with a non-finite value is applied."""

_RECORD = np.dtype(
    {
        "names": (
            *("cause", "action", "skip", "grad_scale", "lr_scale"),
            *("threshold", "z", "z_loss", "incident", "incident_open", "due"),
        ),
        "formats": (*("i4", "i4", "?", "f4", "f4"), *("f4", "f4", "f4", "i4", "?", "?")),
    }
)


@dataclass(frozen=True, eq=False)
class JudgedRows:
    """The judged rows of a trace. Arrays are (n,)."""

    index: np.ndarray
    """int64: rows of the trace."""
    step: np.ndarray
    """float64"""
    attempt: np.ndarray
    """int64"""
    logged: dict[str, np.ndarray]
    """bool by signal that the engine gets: whether the row logs the signal."""
    record: np.recarray
    """Decisions: fields of `StepRecord`."""
    due: np.ndarray
    """bool: a rollback is due, even if the budget denies it. Of the denied rollbacks of an incident
    only the first is due."""
    repeated: np.ndarray
    """bool: a rollback was due earlier in the same incident."""
    ends_run: np.ndarray
    """bool: a live run ends here, even if all earlier rollbacks helped."""

    @functools.cached_property
    def spent(self) -> np.ndarray:
        """bool: a rollback is due, but the budget denies it."""
        return self.due & (self.record.action & int(Action.ROLLBACK) == 0)

    @functools.cached_property
    def action(self) -> np.ndarray:
        """int32: the orders, with ROLLBACK at each row where a rollback is due."""
        return self.record.action | np.where(self.due, int(Action.ROLLBACK), 0)

    @functools.cached_property
    def clipped(self) -> np.ndarray:
        """bool: the gradient is scaled down, and the step is not skipped."""
        return (self.record.grad_scale < 1) & ~self.record.skip

    @functools.cached_property
    def decided(self) -> np.ndarray:
        """bool: the decision is not neutral."""
        record = self.record
        return (
            (record.cause != 0)
            | (record.action != 0)
            | record.skip
            | (record.grad_scale != 1)
            | (record.lr_scale != 1)
            | self.due
        )


def judge(engine: Engine, trace: Trace) -> JudgedRows:
    """Judges the rows of a trace that log a loss or a gradient norm.

    As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
    budgets and LR multiplier. An attempt from scratch is a rollback to the first state.
    """
    rows = trace.rows
    index, combinations, kind = _choose_signals(engine, rows)
    attempt = rows.attempt[index]
    loops = [_recorded_loop(engine.config, names) for names in combinations]
    inputs = [[rows.values[name][index] for name in names] for names in combinations]
    record = np.zeros(len(index), _RECORD).view(np.recarray)

    # Numbers of judged rows before each attempt, and up to the row that it resumes after.
    begins = np.searchsorted(attempt, np.arange(len(trace.attempts))).tolist()
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
            record[start:stop] = np.fromiter(decided, _RECORD, stop - start)
            saved[stop] = state
    due = record.due
    incident = np.flatnonzero(
        (np.diff(attempt, prepend=-1) != 0) | (np.diff(record.incident, prepend=-1) != 0)
    )
    repeated = _count_before(due, incident) > 0
    spent = due & (record.action & int(Action.ROLLBACK) == 0)
    return JudgedRows(
        index=index,
        step=rows.step[index],
        attempt=attempt,
        logged={name: logged[index] for name, logged in rows.logged.items()},
        record=record,
        due=due & ~(spent & (_count_before(spent, incident) > 0)),
        repeated=repeated,
        # The engine orders STOP if it denies a due rollback. A rule may also order STOP.
        ends_run=(record.action & int(Action.STOP) != 0) & ~(repeated & due),
    )


def _count_before(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Counts the flags before each row, int (n,), since the last of the rows `starts`."""
    before = np.cumsum(flags) - flags
    lengths = np.diff(starts, append=len(flags))
    return before - np.repeat(before[starts], lengths)


def _choose_signals(
    engine: Engine, rows: Rows
) -> tuple[np.ndarray, list[tuple[str, ...]], np.ndarray]:
    """Chooses the rows with a loss or a gradient norm, and the signals of each for the engine.

    `update_norm` and `eval_loss` are passed only if the policy reads them, as in the adapters. In a
    trace with evaluations every row has `eval_loss`, which is NaN without an evaluation, because
    the signals of an engine are fixed for a run.

    Returns:
        The rows, int (n,), the distinct sets of signals, and the place of each row's set, int (n,).
    """
    names = [name for name in (*ALWAYS_PASSED, "update_norm") if name in rows.logged]
    if "update_norm" not in engine.needs:
        names = [name for name in names if name in ALWAYS_PASSED]
    has_evaluations = "eval_loss" in engine.needs and rows.logged.get("eval_loss", np.False_).any()
    logged = np.array([rows.logged[name] for name in names])
    index = np.flatnonzero(logged[[name in ALWAYS_PASSED for name in names]].any(axis=0))
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
    """Judges one row. Returns the new state, and the fields of `_RECORD`.

    A live run rolls back when ordered, so the order is subtracted from the budget here.
    """
    signals = Signals(**dict(zip(names, values, strict=True)))
    new, _ = engine.step(state, signals, xp=xp)
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
