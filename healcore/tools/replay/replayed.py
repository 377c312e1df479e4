"""Replays one policy over one recorded trace, and summarizes the decisions.

A replay cannot restore a checkpoint. Where a rollback is due, the replay reports the rollback and
continues along the recorded curve. The engine's state is restored only where the recorded run was
resumed or rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from healcore.console import listed
from healcore.core.decision import Action, Cause, names
from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.curves import thinned
from healcore.history.incident import MOST_ALARMS
from healcore.history.run import RunAttempt
from healcore.policy import PolicyLike
from healcore.runtime.run_options import HostPolicy
from healcore.tools.replay.judged import judge_trace
from healcore.tools.report.run_report import RunReport, first_lines
from healcore.tools.traces.columns import JUDGED, Trace

_ROLLBACK, _STOP, _CUT_LR = map(int, (Action.ROLLBACK, Action.STOP, Action.CUT_LR))


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy."""


class Decided(NamedTuple):
    """One row with the decision of the policy. Observe mode has the same decisions."""

    index: int
    step: float
    cause: Cause
    action: Action
    """Orders to the host, with ROLLBACK if a rollback was due."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z scores by signal, for signals that the row logs and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped, or None for no limit."""
    attempt: int
    spent: bool
    """Whether the budget denied a due rollback. A live run ends here."""


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
    """Number of rows by order, with ROLLBACK at each row where a rollback was due."""
    skips: int
    clips: int
    incidents: int
    rollbacks: int
    """Number of rows where a rollback was due, including repeated and denied rollbacks."""
    repeats: int
    """Number of rollbacks after the first of their incident. Live, only failed ones repeat."""
    spent: int
    """Number of rollbacks that the budget denied, at most one per incident."""
    repeat_cuts: int
    """Number of cuts of the learning rate after the first rollback of their incident."""
    lowest_lr: float
    """The smallest learning-rate multiplier."""
    lowest_lr_first: float
    """The smallest multiplier without repeat cuts."""
    stopped_step: float | None
    """Step at which a live run ends: a rule stops it, or an incident's first rollback is denied."""
    inactive: dict[str, tuple[str, ...]]
    """Inactive parts of the policy, by the signal that the trace does not log."""
    problems: int
    """Number of lines of the trace that could not be read."""

    @property
    def first_rollbacks(self) -> int:
        """Number of rollbacks that are the first of their incident."""
        return self.rollbacks - self.repeats


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows whose decision is not neutral."""

    trace: Trace
    host: HostPolicy
    rows: np.recarray
    """The judged rows, see `healcore.tools.replay.judged`."""
    summary: Summary
    incidents: tuple[Incident, ...]

    def __iter__(self) -> Iterator[Decided]:
        rows, config = self.rows, self.host.engine.config
        decided = (rows.cause != 0) | (rows.action != 0) | rows.skip
        decided |= (rows.grad_scale != 1) | (rows.lr_scale != 1)
        # A score of a row that does not log its signal is the score of an earlier row.
        scores = {}
        if config.clip is not None and not self.host.engine.per_tensor:
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
                spent=bool(row["spent"]),
            )

    def lines(self) -> Iterator[str]:
        """Yields a line of JSON for each decided row, and a line for the summary."""
        trace, policy, *_ = self.summary
        for row in self:
            line = row._asdict() | {"cause": names(row.cause), "action": names(row.action)}
            spent = {"spent": True} if line.pop("spent") else {}
            if row.threshold is None:
                del line["threshold"]
            line["step"] = _number(row.step)
            yield _line({"trace": trace, **line, "policy": policy, **spent})
        fields = {
            name: _number(value) if isinstance(value, float) else value
            for name, value in self.summary._asdict().items()
        }
        yield _line(
            {"trace": fields.pop("trace"), "summary": True, "steps": len(self.rows), **fields}
        )

    def report(self) -> RunReport:
        """Returns the report of the replay for a page."""
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
            policy_toml=self.host.text or "",
            fingerprint=summary.fingerprint,
            curves=thinned(_curves(trace, rows)),
            incidents=self.incidents,
            counts=Counts(
                incidents=summary.incidents,
                rollbacks=summary.first_rollbacks,
                skips=summary.skips,
                clips=summary.clips,
                alarms=summary.alarms,
            ),
            # The fields of the summary's line of JSON, by the same names.
            facts={name: str(value) for name, value in summary._asdict().items() if value},
            notes=(*notes, *first_lines("not read", trace.problems), *trace.notes),
            attempts=tuple(
                RunAttempt(number, attempt.first_step, attempt.source)
                for number, attempt in enumerate(trace.attempts)
            ),
            alarms_outside=shown,
            stop=summary.stopped_step,
        )


def replay(trace: Trace, policy: PolicyLike | HostPolicy, *, name: str | None = None) -> Replay:
    """Replays a policy over a trace.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: the name of a preset, a path of a TOML file, a `Policy`, an `Engine` or its config,
            or a `HostPolicy`, which saves time with several traces.
        name: name of the policy in the results, or None for the policy's own name.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    host = policy if isinstance(policy, HostPolicy) else HostPolicy.of(policy)
    name = name or host.name
    inactive = _find_inactive(host.engine, trace, name)
    rows = judge_trace(host.engine, trace)
    incidents = _find_incidents(rows)
    steps, lr_scale = trace.rows.step, rows.lr_scale
    rollbacks, cuts = rows.action & _ROLLBACK != 0, rows.action & _CUT_LR != 0
    alarms, stops = rows.step[rows.cause != 0], rows.step[rows.ends_run]
    summary = Summary(
        trace=trace.name,
        policy=name,
        fingerprint=host.engine.fingerprint or "",
        rows=len(steps),
        unjudged=len(steps) - len(rows),
        first_step=float(steps[0]),
        last_step=float(steps[-1]),
        alarms=_count(rows.cause),
        first_alarm=float(alarms[0]) if alarms.size else None,
        causes=_counts_by_flag(rows.cause, Cause),
        actions=_counts_by_flag(rows.action, Action),
        skips=_count(rows.skip),
        clips=_count(rows.clipped),
        incidents=len(incidents),
        rollbacks=_count(rollbacks),
        repeats=_count(rollbacks & rows.repeated),
        spent=_count(rows.spent),
        repeat_cuts=_count(cuts & rows.repeated),
        lowest_lr=shortest(lr_scale.min(initial=np.float32(1))),
        lowest_lr_first=shortest(lr_scale[cuts & ~rows.repeated].min(initial=np.float32(1))),
        stopped_step=float(stops[0]) if stops.size else None,
        inactive=inactive,
        problems=len(trace.problems),
    )
    return Replay(trace, host, rows, summary, tuple(incidents))


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


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """Describes the parts of a policy that are inactive without a signal."""
    is_of_tensors = signal == "group_norms"
    reason = "in any log (AdaGC reads the norm of every tensor)" if is_of_tensors else "logged"
    verb = "is" if len(parts) == 1 else "are"
    return f"no {signal} {reason}: {listed(parts)} {verb} inactive"


def _count(rows: np.ndarray) -> int:
    return int(np.count_nonzero(rows))


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
    action = np.where(rows.ends_run, rows.action, rows.action & ~_STOP)
    orders = np.flatnonzero(action & (_ROLLBACK | _STOP))
    all_orders = Action(int(np.bitwise_or.reduce(action)))
    after = [lr_before, *rows.lr_scale[~rows.repeated]][-1]
    rollback = action & _ROLLBACK != 0
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
        clipped=_count(rows.clipped),
        # A live run repeats a rollback only if the first did not help.
        repeats=_count(rows.repeated & rollback & ~rows.spent),
        repeat_denied=bool((rows.repeated & rows.spent).any()),
        denied=bool((~rows.repeated & rows.spent).any()),
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
