"""Selects the rows that an engine judges, and holds its decisions about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from healcore.core.engine import Engine
from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause
from healcore.plugins.rows import SignalLayout, SignalRows
from healcore.tools.traces.trace import by_signals

ALWAYS = ("loss", "grad_norm")
"""Given wherever logged: no update with a non-finite value is applied, whatever a policy reads."""


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


class Decided(NamedTuple):
    """One row, with the decision of the policy (in observe mode too)."""

    index: int
    step: float
    """The recorded step; NaN if it could not be read."""
    attempt: int
    cause: Cause
    action: Action
    """Contains ROLLBACK wherever a rollback was due."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z score of each signal that the row has and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped; None: no such limit applies here."""
    spent: bool
    """A rollback was due and the budget denied it: a live run ends here."""


class JudgedRows(NamedTuple):
    """Consecutive judged rows of one attempt.

    Arrays, also those of `record`, are (n,); `index` is int64, `step` float64.
    """

    index: np.ndarray
    step: np.ndarray
    attempt: int
    given: dict[str, np.ndarray]
    """bool by signal: logged in this row."""
    record: StepRecord
    due: np.ndarray
    """bool: a rollback was due, whether or not the budget still allowed it."""
    again: np.ndarray
    """bool: a rollback was due earlier in the row's incident; see `RepeatMarker`."""
    ends: np.ndarray
    """bool: a live run ends here, even if every rollback before had helped."""

    @property
    def spent(self) -> np.ndarray:
        """bool: see `Decided.spent`."""
        return self.due & (self.record.action & int(Action.ROLLBACK) == 0)

    @property
    def action(self) -> np.ndarray:
        """int32: the orders, ROLLBACK wherever one was due."""
        return self.record.action | np.where(self.due, int(Action.ROLLBACK), 0)

    @property
    def clipped(self) -> np.ndarray:
        """bool: the gradient was scaled down, and the step not skipped."""
        return (self.record.grad_scale < 1) & ~self.record.skip

    @property
    def decided(self) -> np.ndarray:
        """bool: the decision is not the neutral one."""
        record = self.record
        return (
            (record.cause != 0)
            | (record.action != 0)
            | record.skip
            | (record.grad_scale != 1)
            | (record.lr_scale != 1)
            | self.due
        )


def decided(judged: JudgedRows, engine: Engine) -> Iterator[Decided]:
    """The rows of a chunk whose decision is not neutral, in order."""
    record, action, spent = judged.record, judged.action, judged.spent
    scored = _scored(judged, engine)
    limits = scored.get("grad_norm")
    for row in np.flatnonzero(judged.decided):
        yield Decided(
            index=int(judged.index[row]),
            step=float(judged.step[row]),
            attempt=judged.attempt,
            cause=Cause(int(record.cause[row])),
            action=Action(int(action[row])),
            skip=bool(record.skip[row]),
            grad_scale=shortest(record.grad_scale[row]),
            lr_scale=shortest(record.lr_scale[row]),
            z={name: shortest(z[row]) for name, (z, has) in scored.items() if has[row]},
            threshold=(
                None if limits is None or not limits[1][row] else shortest(record.threshold[row])
            ),
            spent=bool(spent[row]),
        )


def shortest(number: np.float32) -> float:
    """The float with the fewest digits that is this float32: 0.1, not 0.10000000149011612."""
    return float(str(number))


def _scored(judged: JudgedRows, engine: Engine) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(scores, rows that have one) by signal; in other rows the record has an older row's score."""
    scored = {}
    if engine.config.clip is not None and not engine.per_tensor and "grad_norm" in judged.given:
        scored["grad_norm"] = (judged.record.z, judged.given["grad_norm"])
    if "loss" in judged.given and any(name == "loss_spike" for name, _ in engine.config.detectors):
        scored["loss"] = (judged.record.z_loss, judged.given["loss"])
    return scored


class RepeatMarker:
    """Remembers the last incident in which a rollback was due."""

    def __init__(self) -> None:
        self._ordered = (-1, -1)
        self._denied = (-1, -1)

    def mark(self, judged: JudgedRows) -> JudgedRows:
        """Sets `again` and `ends` of the next rows; keeps one denied rollback per incident."""
        record = judged.record
        again = np.zeros(len(judged.index), bool)
        if judged.attempt == self._ordered[0]:
            again = record.incident == self._ordered[1]
        for row in np.flatnonzero(judged.due):
            incident = (judged.attempt, int(record.incident[row]))
            if incident != self._ordered:
                self._ordered = incident
                again[row + 1 :] = record.incident[row + 1 :] == incident[1]
        # The engine orders STOP when it denies a due rollback; a rule may order STOP itself.
        ends = (record.action & int(Action.STOP) != 0) & ~(again & judged.due)
        due = judged.due.copy()
        for row in np.flatnonzero(judged.spent):
            incident = (judged.attempt, int(record.incident[row]))
            due[row] = incident != self._denied
            self._denied = incident
        return judged._replace(due=due, again=again, ends=ends)
