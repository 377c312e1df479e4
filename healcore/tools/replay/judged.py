"""Runs the rows of a trace through the engine of a policy.

The engine's step is recorded once for each set of signals that rows log together, as on the host of
a live run. It takes 0.02 ms per row; a compiled loop of JAX is not faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from healcore.core import host, step_record
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.recorded import record
from healcore.core.signals import Signals
from healcore.core.step_record import StepRecord
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action
from healcore.tools.traces import Rows, Trace

ALWAYS_PASSED = ("loss", "grad_norm")
"""Signals that every policy gets, because no update with a non-finite value is applied."""


class JudgedRows(NamedTuple):
    """The judged rows of a trace. Arrays are (n,)."""

    index: np.ndarray
    """int64: row numbers in the trace."""
    step: np.ndarray
    """float64"""
    attempt: np.ndarray
    """int64"""
    logged: dict[str, np.ndarray]
    """bool by signal that the engine gets: whether the row logs the signal."""
    record: StepRecord
    """Decisions, with fields of shape (n,)."""
    due: np.ndarray
    """bool: a rollback is due, even if the budget denies it. Of the denied rollbacks of an incident
    only the first is due."""
    repeated: np.ndarray
    """bool: a rollback was due earlier in the same incident."""
    ends_run: np.ndarray
    """bool: a live run ends here, even if all earlier rollbacks helped."""
    separate: frozenset[int]
    """Attempts that do not continue the attempt before them: other runs."""

    @property
    def spent(self) -> np.ndarray:
        """bool: a rollback is due, but the budget denies it."""
        return self.due & (self.record.action & int(Action.ROLLBACK) == 0)

    @property
    def action(self) -> np.ndarray:
        """int32: the orders, with ROLLBACK at each row where a rollback is due."""
        return self.record.action | np.where(self.due, int(Action.ROLLBACK), 0)

    @property
    def clipped(self) -> np.ndarray:
        """bool: the gradient is scaled down, and the step is not skipped."""
        return (self.record.grad_scale < 1) & ~self.record.skip

    @property
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
    """Judges the rows of a trace that log a loss or a gradient norm."""
    rows = trace.rows
    combinations, kind = _choose_signals(engine, rows)
    places = np.flatnonzero(kind >= 0)
    passed = sorted({name for names in combinations for name in names})
    values = {name: rows.values[name][places] for name in passed}
    index, attempt = rows.index[places], rows.attempt[places]
    columns = _empty_columns(len(places))
    steps = [_recorded_step(engine.config, names) for names in combinations]
    kinds = kind[places].tolist()

    def advance(state: EngineState, start: int, stop: int) -> EngineState:
        for row in range(start, stop):
            names = combinations[kinds[row]]
            signals = Signals(**{name: values[name][row] for name in names})
            state, decided = steps[kinds[row]](state, signals)
            for column, value in zip(columns, decided, strict=True):
                column[row] = value
        return state

    separate = _judge_attempts(engine, trace, index, attempt, advance)
    *numbers, due = columns
    record = StepRecord(*numbers)
    incident = np.flatnonzero(
        (np.diff(attempt, prepend=-1) != 0) | (np.diff(record.incident, prepend=-1) != 0)
    )
    repeated = _count_before(due, incident) > 0
    spent = due & (record.action & int(Action.ROLLBACK) == 0)
    return JudgedRows(
        index=index,
        step=rows.step[places],
        attempt=attempt,
        logged={name: rows.logged[name][places] for name in passed},
        record=record,
        due=due & ~(spent & (_count_before(spent, incident) > 0)),
        repeated=repeated,
        # The engine orders STOP if it denies a due rollback. A rule may also order STOP.
        ends_run=(record.action & int(Action.STOP) != 0) & ~(repeated & due),
        separate=separate,
    )


def _count_before(flags: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Counts the flags before each row, int (n,), since the last of the rows `starts`."""
    before = np.cumsum(flags) - flags
    lengths = np.diff(starts, append=len(flags))
    return before - np.repeat(before[starts], lengths)


def _choose_signals(engine: Engine, rows: Rows) -> tuple[list[tuple[str, ...]], np.ndarray]:
    """Chooses the signals of each row for the engine: none without a loss or a gradient norm.

    `update_norm` and `eval_loss` are passed only if the policy reads them, as in the adapters. In a
    trace with evaluations every row has `eval_loss`, which is NaN without an evaluation, because
    the signals of an engine are fixed for a run.

    Returns:
        The distinct sets of signals, and the place of each row's set, int (n,), or -1.
    """
    names = [name for name in Signals._fields if name in rows.logged]
    bits = np.zeros(len(rows.index), np.int64)
    for place, name in enumerate(names):
        bits |= rows.logged[name].astype(np.int64) << place
    combinations: list[tuple[str, ...]] = []
    kind = np.full(len(bits), -1)
    has_evaluations = "eval_loss" in rows.logged and bool(rows.logged["eval_loss"].any())
    for code in np.unique(bits).tolist():
        in_row = {name for place, name in enumerate(names) if code >> place & 1}
        if not in_row & set(ALWAYS_PASSED):
            continue
        passed = [name for name in ALWAYS_PASSED if name in in_row]
        if "update_norm" in engine.needs and "update_norm" in in_row:
            passed.append("update_norm")
        if "eval_loss" in engine.needs and has_evaluations:
            passed.append("eval_loss")
        if tuple(passed) not in combinations:
            combinations.append(tuple(passed))
        kind[bits == code] = combinations.index(tuple(passed))
    return combinations, kind


def _judge_attempts(
    engine: Engine,
    trace: Trace,
    index: np.ndarray,
    attempts: np.ndarray,
    advance: Callable[[EngineState, int, int], EngineState],
) -> frozenset[int]:
    """Judges all rows. Returns the attempts that do not continue the attempt before them.

    As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
    budgets and LR multiplier. A restart in the same file is a rollback to the first state. An
    attempt from scratch in a separate file is another run.

    `advance` judges the rows of a range, and returns the state after them.
    """
    # Attempts resume after these rows, so the states after these rows are saved.
    rows = {each.resumes_after for each in trace.attempts}
    resumed = sorted(row for row in rows if row is not None)
    # Only judged rows change the state.
    places = np.searchsorted(index, np.array(resumed, np.int64), side="right")
    ends = dict(zip(resumed, places.tolist(), strict=True))
    saved: dict[int, EngineState] = {}
    separate: set[int] = set()
    live: EngineState | None = None
    source = ""
    with np.errstate(all="ignore"):  # NumPy scalars warn
        for attempt in trace.attempts:
            state = _first_state(engine)
            if attempt.resumes_after is not None:
                state = saved[attempt.resumes_after]
            elif attempt.source != source:
                separate.add(attempt.number)
            if live is not None and attempt.number not in separate:
                state = _rolled_back(engine, live, state)
            source = attempt.source
            at, stop = np.searchsorted(attempts, (attempt.number, attempt.number + 1)).tolist()
            for row, end in ends.items():
                if row >= attempt.first_index and end <= stop:
                    state = saved[row] = advance(state, at, end)
                    at = end
            live = advance(state, at, stop)
    return frozenset(separate)


# -- the engine on one row -------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _recorded_step(config: EngineConfig, names: tuple[str, ...]) -> Callable[..., Any]:
    """Returns a function of state and signals, recorded once by policy and signals of the row."""
    engine = Engine(config)
    signals = Signals(**dict.fromkeys(names, np.float32(0)))
    return record(functools.partial(_judge_row, engine), _first_state(engine), signals)


def _first_state(engine: Engine) -> EngineState:
    """The engine's first state as NumPy scalars."""
    return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, engine.init())


def _judge_row(
    engine: Engine, state: EngineState, signals: Signals, *, xp: Any
) -> tuple[EngineState, tuple[Any, ...]]:
    """Judges one row. Returns the new state, and the numbers of a `StepRecord` with a bool: due.

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


def _rolled_back(engine: Engine, live: EngineState, restored: EngineState) -> EngineState:
    """`Engine.on_rollback` at a row where the recorded run rolled back.

    The budget stays: `_judge_row` has already subtracted the order, and a restart costs nothing.
    """
    state = engine.on_rollback(live, restored, xp=host)
    return state._replace(budget=state.budget._replace(recoveries=live.budget.recoveries))


def _empty_columns(rows: int) -> tuple[Any, ...]:
    """Allocates columns (rows,) for the results of `_judge_row`."""
    flags = {"incident_open": bool, "skip": bool}
    kinds = [flags.get(name, np.int32) for name in step_record.FIELDS[: step_record.INTS]]
    kinds += [np.float32] * (len(step_record.FIELDS) - step_record.INTS)
    return tuple(np.zeros(rows, kind) for kind in (*kinds, bool))
