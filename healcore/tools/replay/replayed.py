"""Replays one policy over one recorded trace, and summarizes the decisions.

A replay cannot restore a checkpoint. It reports a rollback and continues along the recorded curve,
which does not recover. So an incident may order several rollbacks, and rollbacks do not use up the
budget of the replay. The engine's state is restored only where the recorded run was resumed or
rolled back. The engine's step is recorded as a loop, once for each set of signals that rows log
together.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from healcore.console import first_lines
from healcore.core.decision import Action, Cause, names
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.errors import HealcoreError
from healcore.core.numerics import map_leaves
from healcore.core.signals import Signals
from healcore.core.tape import to_loop
from healcore.history import Curves, Incident, Mode
from healcore.history.curves import thinned
from healcore.history.run import MOST_ALARMS, RunAttempt, count_incidents
from healcore.policy import Policy, PolicyLike, dumps
from healcore.policy.loader import resolve
from healcore.tools.report.run_report import MAX_LINES, RunReport
from healcore.tools.traces.columns import JUDGED, Rows, Trace

_DECIDED = np.dtype(
    [
        *(("cause", "i4"), ("action", "i4"), ("skip", "?"), ("grad_scale", "f4")),
        *(("lr_scale", "f4"), ("threshold", "f4"), ("z", "f4"), ("z_loss", "f4")),
        *(("incident", "i4"), ("incident_open", "?")),
    ]
)
"""What the engine returns for a row: fields of `StepRecord`, and the incident."""
_ROWS = np.dtype([("index", "i8"), ("step", "f8"), ("attempt", "i8"), *_DECIDED.descr])
"""A judged row: the row of the trace, and what the engine returned."""


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy."""


class NotJudgedError(ReplayError):
    """A trace ends in rows without a value, so the other rows would give a wrong verdict."""


class Decided(NamedTuple):
    """One row with the decision of the policy. Observe mode has the same decisions."""

    index: int
    step: float
    cause: Cause
    action: Action
    """Orders to the host."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z scores by signal, for signals that the row logs and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped, or None for no limit."""
    attempt: int


class Summary(NamedTuple):
    """Counts of one trace under one policy: the last line of `healcore replay --jsonl`."""

    trace: str
    policy: str
    fingerprint: str
    rows: int
    unjudged: int
    """Number of rows without a loss and a gradient norm."""
    first_step: float
    last_step: float
    """Step of the last row, which may be smaller than the largest step."""
    alarms: int
    """Number of rows with a cause."""
    first_alarm: float | None
    """Step of the first row with a cause, or None."""
    causes: dict[str, int]
    """Number of rows by cause, lowest flag first."""
    actions: dict[str, int]
    """Number of rows by order."""
    skips: int
    clips: int
    incidents: int
    rollbacks: int
    """Number of incidents with a rollback. Each may order several."""
    lowest_lr: float
    """The smallest learning-rate multiplier."""
    stopped_step: float | None
    """Step at which a rule stops a live run, or None."""
    inactive: dict[str, tuple[str, ...]]
    """Inactive parts of the policy, by the signal that the trace does not log."""
    problems: int
    """Number of lines of the trace that could not be read."""
    unit: str = "step"
    """What the steps of this summary count: "step", or "epoch" or "row" in a log without steps."""
    rounded: bool = False
    """Whether the log rounds its steps, as "12K"."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows whose decision is not neutral."""

    trace: Trace
    policy: Policy | Engine
    engine: Engine
    rows: np.recarray
    """The rows with a loss or a gradient norm, see `_ROWS`."""
    summary: Summary
    incidents: tuple[Incident, ...]

    def __iter__(self) -> Iterator[Decided]:
        rows, config = self.rows, self.engine.config
        decided = (rows.cause != 0) | (rows.action != 0) | rows.skip
        decided |= (rows.grad_scale != 1) | (rows.lr_scale != 1)
        # A score of a row that does not log its signal is the score of an earlier row.
        scores = {}
        if config.clip is not None and not self.engine.per_tensor:
            scores["grad_norm"] = "z"
        if "loss_spike" in dict(config.detectors):
            scores["loss"] = "z_loss"
        logged = self.trace.rows.logged
        scored = [(name, field, logged[name]) for name, field in scores.items() if name in logged]
        for row in rows[decided]:
            z = {name: shortest(row[field]) for name, field, has in scored if has[row["index"]]}
            yield Decided(
                index=int(row["index"]),
                step=float(row["step"]),
                cause=Cause(int(row["cause"])),
                action=Action(int(row["action"])),
                skip=bool(row["skip"]),
                grad_scale=shortest(row["grad_scale"]),
                lr_scale=shortest(row["lr_scale"]),
                z=z,
                threshold=shortest(row["threshold"]) if "grad_norm" in z else None,
                attempt=int(row["attempt"]),
            )

    def lines(self) -> Iterator[str]:
        """Yields a line of JSON for each decided row, and a line for the summary."""
        trace, policy, unit = self.summary.trace, self.summary.policy, self.summary.unit
        for row in self:
            line = row._asdict() | {"cause": names(row.cause), "action": names(row.action)}
            if row.threshold is None:
                del line["threshold"]
            del line["step"]
            line = {"index": line.pop("index"), unit: _number(row.step), **line}
            yield _line({"trace": trace, **line, "policy": policy})
        fields = {
            name: _number(value) if isinstance(value, float) else value
            for name, value in self.summary._asdict().items()
        }
        yield _line(
            {"trace": fields.pop("trace"), "summary": True, "steps": len(self.rows), **fields}
        )

    def report(self) -> RunReport:
        """The report of the replay for a page."""
        summary, trace, rows = self.summary, self.trace, self.rows
        alarms = rows[(rows.cause != 0) & ~rows.incident_open & ~rows.skip]
        shown = {row.step: tuple(names(Cause(int(row.cause)))) for row in alarms[:MOST_ALARMS]}
        notes = [inactive_line(*each) for each in summary.inactive.items()]
        if len(alarms) > len(shown):
            more = f"the plot marks the first {len(shown)}"
            notes.append(f"{len(alarms):,} alarms outside of incidents: {more}")
        return RunReport(
            title=summary.trace,
            mode=Mode.REPLAY,
            policy_name=summary.policy,
            policy_toml="" if isinstance(self.policy, Engine) else dumps(self.policy),
            fingerprint=summary.fingerprint,
            curves=thinned(_curves(trace, rows)),
            incidents=self.incidents,
            counts=count_incidents(
                self.incidents, skips=summary.skips, clips=summary.clips, alarms=summary.alarms
            ),
            # The fields of the summary's line of JSON, by the same names.
            facts={name: str(value) for name, value in summary._asdict().items() if value},
            notes=(*notes, *first_lines(trace.problems, MAX_LINES, "not read: "), *trace.notes),
            attempts=tuple(RunAttempt(each.first_step, each.source) for each in trace.attempts),
            alarms_outside=shown,
            stopped_step=summary.stopped_step,
        )


def replay(trace: Trace, policy: PolicyLike, *, name: str | None = None) -> Replay:
    """Replays a policy over a trace.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: the name of a preset, a path of a TOML file, a `Policy`, or an `Engine` or its
            config.
        name: name of the policy in the results, or None for the policy's own name.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        NotJudgedError: the trace ends in many rows without a loss and a norm.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    policy = resolve(policy)
    engine, own = (
        (policy, "(engine)") if isinstance(policy, Engine) else (policy.engine(), policy.name)
    )
    name = name or own
    inactive = _find_inactive(engine, trace, name)
    _refuse_empty_end(trace)
    rows = _judge_trace(engine, trace)
    incidents = _find_incidents(rows)
    steps = trace.rows.step
    alarms, stops = rows.step[rows.cause != 0], rows.step[rows.action & int(Action.STOP) != 0]
    summary = Summary(
        trace=trace.name,
        policy=name,
        fingerprint=engine.fingerprint or "",
        rows=len(steps),
        unjudged=len(steps) - len(rows),
        first_step=float(steps[0]),
        last_step=float(steps[-1]),
        alarms=len(alarms),
        first_alarm=float(alarms[0]) if alarms.size else None,
        causes=_counts_by_flag(rows.cause, Cause),
        actions=_counts_by_flag(rows.action, Action),
        skips=_count(rows.skip),
        clips=_count(_clipped(rows)),
        incidents=len(incidents),
        rollbacks=sum(incident.rolled_back for incident in incidents),
        lowest_lr=shortest(rows.lr_scale.min(initial=np.float32(1))),
        stopped_step=float(stops[0]) if stops.size else None,
        inactive=inactive,
        problems=len(trace.problems),
        unit=trace.unit,
        rounded=trace.rounded,
    )
    return Replay(trace, policy, engine, rows, summary, tuple(incidents))


def _find_inactive(engine: Engine, trace: Trace, policy: str) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    passed = trace.signals & {*JUDGED, *engine.needs}
    parts = [(name, detector.NEEDS) for name, detector in engine.config.detectors]
    if engine.config.clip is not None:
        parts.insert(0, ("clip", {"group_norms" if engine.per_tensor else "grad_norm"}))
    if all(needs - passed for _, needs in parts):
        needed = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            f"{trace.name}: policy {policy} reads {needed}, but this trace logs only "
            f"{', '.join(sorted(passed))}: pass a log with these signals, or another policy"
        )
    missing = sorted({signal for _, needs in parts for signal in needs - passed})
    return {signal: tuple(name for name, needs in parts if signal in needs) for signal in missing}


_LEAST_EMPTY, _EMPTY_SHARE = 10, 0.1
"""Rows, and fraction of all rows, from which an end without values forbids a verdict."""


def _refuse_empty_end(trace: Trace) -> None:
    """Raises NotJudgedError if the run stops to log its loss and norm long before its end.

    pandas and some writers of JSON write NaN as an empty cell or null. A log with fewer losses than
    rows has them at regular distances.
    """
    rows = trace.rows
    judged = [rows.logged[name] for name in JUDGED if name in rows.logged]
    logged = np.flatnonzero(np.any(judged, axis=0))
    *gaps, last = (np.diff(logged, append=len(rows.step)) - 1).tolist()
    least = max(_LEAST_EMPTY, _EMPTY_SHARE * len(rows.step), 2 * max(gaps, default=0))
    if last > least:
        raise NotJudgedError(
            f"{trace.name}: not judged: the last {last:,} of {len(rows.step):,} rows, from "
            f"{trace.unit} {rows.step[-last]:.15g} on, have no loss and no norm, which may be NaN "
            "that was written as an empty cell or null. Write nan, or cut these rows"
        )


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """Describes the parts of a policy that are inactive without a signal."""
    is_of_tensors = signal == "group_norms"
    reason = "in any log (AdaGC reads the norm of every tensor)" if is_of_tensors else "logged"
    verb = "is" if len(parts) == 1 else "are"
    return f"no {signal} {reason}: {', '.join(parts)} {verb} inactive"


def _count(rows: np.ndarray) -> int:
    return int(np.count_nonzero(rows))


def _clipped(rows: np.recarray) -> np.ndarray:
    """Whether the gradient of each row is scaled down, and its step is not skipped; bool (n,)."""
    return (rows.grad_scale < 1) & ~rows.skip


def _counts_by_flag(flags: np.ndarray, kind: type[Cause] | type[Action]) -> dict[str, int]:
    rows = {str(flag.name): _count(flags & int(flag)) for flag in kind}
    return {name: count for name, count in rows.items() if count}


def _find_incidents(rows: np.recarray) -> list[Incident]:
    """Finds the incidents. Each has the rows with an alarm from its first row to the next one's."""
    opened = np.diff(rows.incident, prepend=0) != 0
    alarmed = (rows.incident_open | rows.skip) & (rows.cause != 0)
    # An attempt ends the incident of the attempt before it.
    begins = np.flatnonzero(opened | (np.diff(rows.attempt, prepend=0) != 0)).tolist()
    incidents = []
    for start, end in pairwise([*begins, len(rows)]):
        if opened[start]:
            own = start + np.flatnonzero((opened | alarmed)[start:end])
            before = rows.lr_scale[start - 1] if start else np.float32(1)
            incidents.append(_incident(rows[own].view(np.recarray), before, len(incidents) + 1))
    return incidents


def _incident(rows: np.recarray, lr_before: np.float32, number: int) -> Incident:
    """Builds an incident from its rows, and the learning-rate multiplier before them."""
    orders = np.flatnonzero(rows.action & int(Action.ROLLBACK | Action.STOP))
    all_orders = Action(int(np.bitwise_or.reduce(rows.action)))
    after = rows.lr_scale[-1]
    return Incident(
        number=number,
        attempt=int(rows.attempt[0]),
        onset_step=float(rows.step[0]),
        # The place of an incident is its first order.
        step=float(rows.step[orders[0] if orders.size else -1]),
        last_step=float(rows.step[-1]),
        cause=tuple(names(Cause(int(np.bitwise_or.reduce(rows.cause))))),
        action=tuple(names(all_orders)),
        mode=Mode.REPLAY,
        skipped=_count(rows.skip),
        clipped=_count(_clipped(rows)),
        lr_path=(shortest(lr_before), shortest(after)) if Action.CUT_LR in all_orders else (),
    )


def _curves(trace: Trace, judged: np.recarray) -> Curves:
    rows = trace.rows
    threshold, lr_scale = np.full((2, len(rows.step)), np.nan, np.float32)
    # A threshold of 0 means no limit.
    threshold[judged.index] = np.where(judged.threshold == 0, np.nan, judged.threshold)
    lr_scale[judged.index] = judged.lr_scale
    nonfinite = np.zeros(len(rows.step), bool)
    for name in ("loss", "grad_norm"):
        if name in rows.values:
            nonfinite |= rows.logged[name] & ~np.isfinite(rows.values[name])
    return Curves(
        step=rows.step,
        loss=rows.values.get("loss", np.full(len(rows.step), np.nan, np.float32)),
        grad_norm=rows.values.get("grad_norm"),
        threshold=threshold,
        lr_scale=lr_scale,
        attempt=rows.attempt,
        nonfinite=nonfinite,
    )


def shortest(number: np.float32) -> float:
    """Converts a float32 to the float with the fewest digits: 0.1, not 0.10000000149011612."""
    return float(str(number))


def _number(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


# -- the engine on the rows of a trace -------------------------------------------------------------


def _judge_trace(engine: Engine, trace: Trace) -> np.recarray:
    """Judges the rows of a trace that log a loss or a gradient norm. Returns `_ROWS` (n,).

    As after a rollback, a resumed attempt has the detectors of its checkpoint, and the current
    budgets and LR multiplier. An attempt from scratch is a rollback to the first state.
    """
    index, combinations, kind = _choose_signals(engine, trace.rows)
    rows = np.zeros(len(index), _ROWS).view(np.recarray)
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


@functools.lru_cache(maxsize=256)
def _recorded_loop(config: EngineConfig, names: tuple[str, ...]) -> Callable[..., Any]:
    """Records the loop over rows that log these signals, once for a policy."""
    engine = Engine(config, limits_norm=False)  # a replay holds nothing
    row = tuple(np.float32(0) for _ in names)
    return to_loop(functools.partial(_judge_row, engine, names), _first_state(engine), row)


def _first_state(engine: Engine) -> EngineState:
    """The engine's first state as NumPy scalars."""
    return map_leaves(lambda leaf: leaf[()] if leaf.ndim == 0 else leaf, engine.init())


def _judge_row(
    engine: Engine, names: tuple[str, ...], state: EngineState, values: tuple[Any, ...], *, xp: Any
) -> tuple[EngineState, tuple[Any, ...]]:
    """Judges one row. Returns the new state, and the fields of `_DECIDED`."""
    new, _ = engine.step(state, Signals(**dict(zip(names, values, strict=True))), xp=xp)
    new = _with_recoveries(new, state)
    incident, last = new.incident, new.last
    decision = last.decision
    return new, (
        *(decision.cause, decision.action, decision.skip, decision.grad_scale, decision.lr_scale),
        *(last.threshold, last.z, last.z_loss, incident.number, incident.open),
    )


def _rolled_back(engine: Engine, live: EngineState, restored: EngineState) -> EngineState:
    """`Engine.on_rollback` at a row where the recorded run rolled back."""
    state = map_leaves(lambda leaf: leaf[()], engine.on_rollback(live, restored, xp=np))
    return _with_recoveries(state, live)


def _with_recoveries(state: EngineState, before: EngineState) -> EngineState:
    """The state with as many rollbacks left as before: rollbacks of a replay cost nothing."""
    left = before.budget.recoveries
    return state._replace(budget=state.budget._replace(recoveries=left))
