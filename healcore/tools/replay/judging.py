"""Runs a policy's engine over the rows of a trace.

The engine's step is recorded once for each set of signals that rows log together. So a million rows
take seconds. Rollbacks do not use up the budget of the replay, because the recorded
curve does not recover after them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.signals import Signals
from healcore.core.tape import to_program
from healcore.core.trees import map_leaves
from healcore.tools.traces.names import JUDGED_SIGNALS
from healcore.tools.traces.trace import Rows, Trace

_DECIDED = np.dtype(
    [
        ("cause", "i4"),
        ("action", "i4"),
        ("skip", "?"),
        ("grad_scale", "f4"),
        ("lr_scale", "f4"),
        ("threshold", "f4"),
        ("z", "f4"),
        ("z_loss", "f4"),
        ("incident", "i4"),
        ("incident_open", "?"),
    ]
)
"""What the engine returns for a row: fields of `StepRecord`, and the incident."""
ROW_DTYPE = np.dtype([("index", "i8"), ("step", "f8"), ("attempt", "i8"), *_DECIDED.descr])
"""A judged row: the row of the trace, and what the engine returned."""


def judge_trace(engine: Engine, trace: Trace) -> np.recarray:
    """Judges the rows of a trace that log a loss or a gradient norm.

    As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
    budgets and LR multiplier. An attempt from scratch is a rollback to the first state.

    Args:
        engine: the engine of the policy. It is not changed.
        trace: the recorded run, with the rows of all its attempts.

    Returns:
        One record of `ROW_DTYPE` for each judged row, shape (n,), in the order of the trace. Rows
        that log neither a loss nor a gradient norm have no record.
    """
    #   rows       0 1 2 3 4 5 6 7 8 9 . . n
    #   attempt 0  |---------------|          the log of the first process
    #   attempt 1                  |-------|  the second process resumed after row 4
    #   cuts       0         5     8       n
    # The engine judges the rows from one cut to the next with one program. Its state is saved at
    # each cut, so that the state before row 5 is there when attempt 1 begins.
    index, combinations, kind = _choose_signals(engine, trace.rows)
    rows = np.zeros(len(index), ROW_DTYPE).view(np.recarray)
    rows.index = index
    rows.step = trace.rows.step[index]
    rows.attempt = trace.rows.attempt[index]
    programs: list[Callable[..., Any]] = []  # for each set of signals
    inputs: list[list[np.ndarray]] = []  # and its columns, (n,) each
    for names in combinations:
        programs.append(_program(engine.config, names))
        inputs.append([trace.rows.values[name][index] for name in names])

    # Numbers of judged rows before each attempt, and up to the row that it resumes after.
    begins = np.searchsorted(rows.attempt, np.arange(len(trace.attempts))).tolist()
    last: list[int] = []
    for attempt in trace.attempts:
        if attempt.resumes_after is None:
            last.append(-1)
        else:
            last.append(attempt.resumes_after)
    resumes = dict(zip(begins, np.searchsorted(index, last, side="right").tolist(), strict=True))
    changes = (1 + np.flatnonzero(np.diff(kind))).tolist()
    cuts = sorted({0, *begins, *resumes.values(), *changes, len(index)})
    state = _first_state(engine)
    # The states at the cuts, by number of judged rows.
    saved = {0: state}
    with np.errstate(all="ignore"):  # NumPy would warn of NaN and overflow
        for start, stop in itertools.pairwise(cuts):
            if start and start in resumes:
                state = _rolled_back(engine, state, saved[resumes[start]])
            columns = [column[start:stop] for column in inputs[kind[start]]]
            program = programs[kind[start]]
            decided = []
            for values in zip(*columns, strict=True):
                state, decision = program(state, values)
                decided.append(decision)
            decisions = np.fromiter(decided, _DECIDED, stop - start)
            for name in _DECIDED.names or ():
                rows[name][start:stop] = decisions[name]
            saved[stop] = state
    return rows


def _choose_signals(
    engine: Engine, rows: Rows
) -> tuple[np.ndarray, list[tuple[str, ...]], np.ndarray]:
    """Chooses the rows with a loss or a gradient norm, and the signals of each for the engine.

    `eval_loss` is passed only if the policy reads it, as in the adapters. In a trace with
    evaluations every row has `eval_loss`, which is NaN without an evaluation, because the signals
    of an engine are fixed for a run. Returns the rows, int (n,), the distinct sets of signals, and
    the place of each row's set, int (n,).
    """
    names = [name for name in JUDGED_SIGNALS if name in rows.logged]
    has_evaluations = "eval_loss" in engine.needs and rows.logged.get("eval_loss", np.False_).any()
    logged = np.array([rows.logged[name] for name in names])
    index = np.flatnonzero(logged.any(axis=0))
    distinct, kind = np.unique(logged[:, index], axis=1, return_inverse=True)
    combinations: list[tuple[str, ...]] = []
    for column in distinct.T.tolist():
        signals = list(itertools.compress(names, column))
        if has_evaluations:
            signals.append("eval_loss")
        combinations.append(tuple(signals))
    return index, combinations, kind


@functools.lru_cache(maxsize=256)
def _program(config: EngineConfig, names: tuple[str, ...]) -> Callable[..., Any]:
    """Records the judgement of a row that logs these signals, once for a policy."""
    engine = Engine(config, limits_norm=False)  # a replay sets no limit of the norm
    row = tuple(np.float32(0) for _ in names)
    return to_program(functools.partial(_judge_row, engine, names), _first_state(engine), row)


def _first_state(engine: Engine) -> EngineState:
    """The engine's first state as NumPy scalars."""

    def to_scalar(leaf: np.ndarray) -> Any:
        if leaf.ndim == 0:
            return leaf[()]
        return leaf

    return map_leaves(to_scalar, engine.init())


def _judge_row(
    engine: Engine, names: tuple[str, ...], state: EngineState, values: tuple[Any, ...]
) -> tuple[EngineState, tuple[Any, ...]]:
    """Judges one row. Returns the new state, and the fields of `_DECIDED`."""
    new, _ = engine.step(state, Signals(**dict(zip(names, values, strict=True))))
    new = _with_recoveries(new, state)
    incident, last = new.incident, new.last
    decision = last.decision
    return new, (
        decision.cause,
        decision.action,
        decision.skip,
        decision.grad_scale,
        decision.lr_scale,
        last.threshold,
        last.z,
        last.z_loss,
        incident.number,
        incident.open,
    )


def _rolled_back(engine: Engine, live: EngineState, restored: EngineState) -> EngineState:
    """`Engine.on_rollback` at a row where the recorded run rolled back."""
    state = map_leaves(lambda leaf: leaf[()], engine.on_rollback(live, restored))
    return _with_recoveries(state, live)


def _with_recoveries(state: EngineState, before: EngineState) -> EngineState:
    """The state with as many rollbacks left as before: rollbacks of a replay cost nothing."""
    left = before.budget.recoveries
    return state._replace(budget=state.budget._replace(recoveries=left))
