"""Replays one policy over one recorded trace, and summarizes the decisions.

A replay cannot restore a checkpoint. Where a rollback is due, the replay reports the rollback and
continues along the recorded curve. The engine's state is restored only where the recorded run was
resumed or rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from healcore.console import listed
from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.policy import PolicyLike
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay.judged import ALWAYS_PASSED, JudgedRows, judge
from healcore.tools.traces import Trace


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


@dataclass(kw_only=True)
class Summary:
    """Counts of one trace under one policy.

    `first_step`, `last_step` and `stopped_step` are steps.
    """

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
    """Where a live run ends: a rule orders STOP, or an incident's first rollback is denied."""
    inactive: dict[str, tuple[str, ...]]
    """Inactive parts of the policy, by the signal that the trace does not log."""
    problems: int
    """Number of lines of the trace that could not be read."""

    @property
    def first_rollbacks(self) -> int:
        """Number of rollbacks that are the first of their incident."""
        return self.rollbacks - self.repeats

    @property
    def first_cuts(self) -> int:
        """Number of cuts of the learning rate, without repeated cuts."""
        return self.actions.get("CUT_LR", 0) - self.repeat_cuts


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows whose decision is not neutral."""

    trace: Trace
    policy: str
    """Name of the policy."""
    host: HostPolicy
    judged: JudgedRows
    summary: Summary
    incidents: tuple[Incident, ...]

    def __iter__(self) -> Iterator[Decided]:
        judged, record = self.judged, self.judged.record
        action, spent = judged.action, judged.spent
        columns = {name: record[name] for name in record.dtype.names or ()}
        # A score of a row that does not log its signal is the score of an earlier row.
        scores = {}
        config, per_tensor = self.host.engine.config, self.host.engine.per_tensor
        if config.clip is not None and not per_tensor and "grad_norm" in judged.logged:
            scores["grad_norm"] = (record.z, judged.logged["grad_norm"])
        if "loss" in judged.logged and "loss_spike" in dict(config.detectors):
            scores["loss"] = (record.z_loss, judged.logged["loss"])
        for row in np.flatnonzero(judged.decided).tolist():
            z = {name: shortest(values[row]) for name, (values, has) in scores.items() if has[row]}
            yield Decided(
                index=int(judged.index[row]),
                step=float(judged.step[row]),
                cause=Cause(int(columns["cause"][row])),
                action=Action(int(action[row])),
                skip=bool(columns["skip"][row]),
                grad_scale=shortest(columns["grad_scale"][row]),
                lr_scale=shortest(columns["lr_scale"][row]),
                z=z,
                threshold=shortest(columns["threshold"][row]) if "grad_norm" in z else None,
                attempt=int(judged.attempt[row]),
                spent=bool(spent[row]),
            )

    def lines(self) -> Iterator[str]:
        """Yields a line of JSON for each decided row, and a line for the summary."""
        for row in self:
            line = row._asdict() | {"cause": names(row.cause), "action": names(row.action)}
            spent = {"spent": True} if line.pop("spent") else {}
            if row.threshold is None:
                del line["threshold"]
            line["step"] = _number(row.step)
            yield _line({"trace": self.trace.name, **line, "policy": self.policy, **spent})
        fields = {
            name: _number(value) if isinstance(value, float) else value
            for name, value in asdict(self.summary).items()
        }
        steps = self.summary.rows - self.summary.unjudged
        yield _line({"trace": fields.pop("trace"), "summary": True, "steps": steps, **fields})


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
    judged = judge(host.engine, trace)
    incidents = find_incidents(judged)
    summary = summarize(trace, judged, incidents, name, host.engine.fingerprint or "", inactive)
    return Replay(trace, name, host, judged, summary, tuple(incidents))


def _find_inactive(engine: Engine, trace: Trace, policy: str) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    passed = trace.signals & {*ALWAYS_PASSED, *engine.needs}
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


def summarize(
    trace: Trace,
    judged: JudgedRows,
    incidents: Sequence[Incident],
    policy: str,
    fingerprint: str,
    inactive: Mapping[str, tuple[str, ...]],
) -> Summary:
    """Counts the decisions of a replay."""

    def count(rows: np.ndarray) -> int:
        return int(np.count_nonzero(rows))

    record, action, lr_scale = judged.record, judged.action, judged.record.lr_scale
    rollbacks = action & int(Action.ROLLBACK) != 0
    cuts = action & int(Action.CUT_LR) != 0
    stops = np.flatnonzero(judged.ends_run)
    return Summary(
        trace=trace.name,
        policy=policy,
        fingerprint=fingerprint,
        rows=len(trace.rows.step),
        unjudged=len(trace.rows.step) - len(judged.index),
        first_step=float(trace.rows.step[0]),
        last_step=float(trace.rows.step[-1]),
        alarms=count(record.cause),
        causes=_counts_by_flag(record.cause, Cause),
        actions=_counts_by_flag(action, Action),
        skips=count(record.skip),
        clips=count(judged.clipped),
        incidents=len(incidents),
        rollbacks=count(rollbacks),
        repeats=count(rollbacks & judged.repeated),
        spent=count(judged.spent),
        repeat_cuts=count(cuts & judged.repeated),
        lowest_lr=shortest(lr_scale.min(initial=np.float32(1))),
        lowest_lr_first=shortest(lr_scale[cuts & ~judged.repeated].min(initial=np.float32(1))),
        stopped_step=float(judged.step[stops[0]]) if stops.size else None,
        inactive=dict(inactive),
        problems=len(trace.problems),
    )


def _counts_by_flag(flags: np.ndarray, kind: type[Cause] | type[Action]) -> dict[str, int]:
    rows = {str(flag.name): int(np.count_nonzero(flags & int(flag))) for flag in kind}
    return {name: count for name, count in rows.items() if count}


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """Describes the parts of a policy that are inactive without a signal."""
    is_of_tensors = signal == "group_norms"
    reason = "in any log (AdaGC reads the norm of every tensor)" if is_of_tensors else "logged"
    verb = "is" if len(parts) == 1 else "are"
    return f"no {signal} {reason}: {listed(parts)} {verb} inactive"


def find_incidents(judged: JudgedRows) -> list[Incident]:
    """Finds the incidents. Each has the rows with an alarm from its first row to the next one's."""
    record = judged.record
    opened = np.diff(record.incident, prepend=0) != 0
    alarmed = (record.incident_open | record.skip) & (record.cause != 0)
    # An attempt ends the incident of the attempt before it.
    begins = np.flatnonzero(opened | (np.diff(judged.attempt, prepend=0) != 0)).tolist()
    incidents = []
    for start, end in pairwise([*begins, len(opened)]):
        if opened[start]:
            rows = start + np.flatnonzero((opened | alarmed)[start:end])
            incidents.append(_incident(judged, rows, len(incidents) + 1))
    return incidents


def _incident(judged: JudgedRows, rows: np.ndarray, number: int) -> Incident:
    """Builds an incident from the places of its rows among the judged rows, int (m,)."""
    steps, lr_scale = judged.step[rows], judged.record.lr_scale
    repeated, spent, action = judged.repeated[rows], judged.spent[rows], judged.action[rows]
    action = np.where(judged.ends_run[rows], action, action & ~int(Action.STOP))
    rollback = action & int(Action.ROLLBACK) != 0
    orders = np.flatnonzero(action & int(Action.ROLLBACK | Action.STOP))
    all_orders = Action(int(np.bitwise_or.reduce(action)))
    first = np.flatnonzero(~repeated)
    before = lr_scale[rows[0] - 1] if rows[0] else np.float32(1)
    after = lr_scale[rows[first[-1]]] if first.size else before
    return Incident(
        number=number,
        attempt=int(judged.attempt[rows[0]]),
        onset_step=float(steps[0]),
        # The place of an incident is its first order.
        step=float(steps[orders[0] if orders.size else -1]),
        last_step=float(steps[-1]),
        cause=tuple(names(Cause(int(np.bitwise_or.reduce(judged.record.cause[rows]))))),
        action=tuple(names(all_orders)),
        mode=Mode.REPLAY,
        skipped=int(np.count_nonzero(judged.record.skip[rows])),
        clipped=int(np.count_nonzero(judged.clipped[rows])),
        # A live run repeats a rollback only if the first did not help.
        repeats=int(np.count_nonzero(repeated & rollback & ~spent)),
        repeat_denied=bool((repeated & spent).any()),
        denied=bool((~repeated & spent).any()),
        lr_path=(shortest(before), shortest(after)) if Action.CUT_LR in all_orders else (),
    )


def shortest(number: np.float32) -> float:
    """Converts a float32 to the float with the fewest digits: 0.1, not 0.10000000149011612."""
    return float(str(number))


def _number(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
