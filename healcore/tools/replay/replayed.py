"""Replays one policy over one recorded trace, and summarizes the decisions.

A replay cannot restore a checkpoint. It reports a rollback and continues along the recorded curve,
which does not recover. So an incident may order several rollbacks, and rollbacks do not use up the
budget of the replay. The engine's state is restored only where the recorded run was resumed or
rolled back. `healcore.tools.replay.judging` runs the engine.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from healcore.console import first_lines, first_of
from healcore.core.array_namespace import shortest_decimal
from healcore.core.decision import NONFINITE, Action, Cause, names_of
from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.events.kinds import flags_text
from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.curves import thinned
from healcore.history.run_history import MAX_ALARMS, RunAttempt, alarm_spans
from healcore.policy import Policy, PolicyLike, dumps
from healcore.policy.loader import resolve
from healcore.tools.replay.judging import judge_trace
from healcore.tools.report.page_report import MAX_LINES, PageReport
from healcore.tools.traces.names import JUDGED_SIGNALS
from healcore.tools.traces.trace import Trace, missing_signals


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy.

    For example, the policy judges gradient norms, and the trace logs only losses. A replay without
    a decision would look like a healthy run.
    """


class DecidedRow(NamedTuple):
    """One row of a trace with the decision of the policy.

    A live run in mode "observe" records the same decisions, and a run in mode "heal" carries them
    out. After a rollback, a live run continues with other values than the recorded curve. Iterate
    over a `Replay` for these rows.
    """

    index: int
    """Place of the row in the trace, from 0."""
    step: float
    """Step, epoch or row number, see `Summary.unit`."""
    cause: Cause
    """`Cause` flags of the row, 0 without a cause."""
    action: Action
    """Orders to the host."""
    skip: bool
    """Whether the update of the step would be skipped."""
    grad_scale: float
    """Factor of the gradient: below 1 in a clipped step."""
    lr_scale: float
    """Factor of the learning rate: below 1 after a cut."""
    z: dict[str, float]
    """z scores by signal, for signals that the row logs and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped, or None for no limit."""
    attempt: int
    """Number of the attempt, from 0. An attempt is the part of a run from a start or a resume."""


class Summary(NamedTuple):
    """Counts of one trace under one policy: the last line of `healcore replay --jsonl`.

    Compare policies by these counts, for example the alarms in runs that trained well, and the
    rollbacks in runs that did not. Alarms, skips and clips are numbers of rows, and a log may have
    one row for many steps.
    """

    trace: str
    """Name of the trace, see `Trace.name`."""
    policy: str
    """Name of the policy."""
    fingerprint: str
    """`Engine.fingerprint` of the policy, or empty for a policy of arrays."""
    rows: int
    """Number of rows."""
    unjudged: int
    """Number of rows without a loss and a gradient norm."""
    first_step: float
    """Step of the first row, in `unit`."""
    last_step: float
    """Step of the last row, which may be smaller than the largest step."""
    alarms: int
    """Number of rows with a cause."""
    first_alarm: float | None
    """Step of the first row with a cause, or None."""
    causes: dict[str, int]
    """Number of rows by cause, lowest flag first."""
    actions: dict[str, int]
    """Number of rows by name of the ordered action."""
    skips: int
    """Number of rows whose step would be skipped."""
    clips: int
    """Number of rows whose gradient would be scaled down and not skipped."""
    incidents: int
    """Number of incidents."""
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
    judged_from: float | None = None
    """Step of the first row that all detectors judge, because they have learnt the rows before it.
    None if no detector learns the run first, or if the log is too short."""
    missing: dict[str, str] = {}  # noqa: RUF012 -- never changed
    """Signal -> a clause, for each signal that the last rows lack. The run may have diverged in
    these rows, because some programs do not write NaN."""
    onsets: tuple[float, ...] = ()
    """Steps at which alarms begin: the first one, and each that follows `incident.quiet_steps` rows
    without an alarm."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows with a decision that is not neutral.

        result = replay(traces[0], "default")
        skipped_steps = [row.step for row in result if row.skip]

    A decision is neutral if the policy has no cause and no order, and the step has its own gradient
    and learning rate.
    """

    trace: Trace
    """The recorded run."""
    policy: Policy | Engine
    """The policy as it was passed: a `Policy`, or an `Engine`."""
    engine: Engine
    """The engine of the policy, without a state."""
    rows: np.recarray
    """The rows with a loss or a gradient norm, see `healcore.tools.replay.judging.ROW_DTYPE`."""
    summary: Summary
    """Counts of the whole trace."""
    incidents: tuple[Incident, ...]
    """The incidents, in the order of the rows."""

    def __iter__(self) -> Iterator[DecidedRow]:
        rows, config = self.rows, self.engine.config
        is_decided = (rows.cause != 0) | (rows.action != 0) | rows.skip
        is_decided |= (rows.grad_scale != 1) | (rows.lr_scale != 1)
        # Signal -> the field of its z score.
        scores: dict[str, str] = {}
        if config.clip is not None and not self.engine.per_tensor:
            scores["grad_norm"] = "z"
        if "loss_spike" in dict(config.detectors):
            scores["loss"] = "z_loss"
        logged = self.trace.rows.logged
        for row in rows[is_decided]:
            z: dict[str, float] = {}
            for signal, field in scores.items():
                # The score of a row that does not log the signal is the score of an earlier row.
                if signal in logged and logged[signal][row["index"]]:
                    z[signal] = shortest_decimal(row[field])
            threshold = None
            if "grad_norm" in z:
                threshold = shortest_decimal(row["threshold"])
            yield DecidedRow(
                index=int(row["index"]),
                step=float(row["step"]),
                cause=Cause(int(row["cause"])),
                action=Action(int(row["action"])),
                skip=bool(row["skip"]),
                grad_scale=shortest_decimal(row["grad_scale"]),
                lr_scale=shortest_decimal(row["lr_scale"]),
                z=z,
                threshold=threshold,
                attempt=int(row["attempt"]),
            )

    def lines(self) -> Iterator[str]:
        """Yields the lines of `healcore replay --jsonl`.

        Yields:
            A JSON object and a newline for each decided row, in the order of the trace, and at last
            for the summary.
        """
        trace = self.summary.trace
        policy = self.summary.policy
        unit = self.summary.unit
        for row in self:
            line = row._asdict() | {"cause": names_of(row.cause), "action": names_of(row.action)}
            if row.threshold is None:
                del line["threshold"]
            del line["step"]
            line = {"index": line.pop("index"), unit: _number(row.step), **line}
            yield _line({"trace": trace, **line, "policy": policy})
        summary: dict[str, Any] = {"trace": trace, "summary": True, "steps": len(self.rows)}
        for name, value in self.summary._asdict().items():
            if isinstance(value, float):
                value = _number(value)
            summary[name] = value
        yield _line(summary)

    def report(self) -> PageReport:
        """Builds the report of the replay.

        Returns:
            The report for `healcore.tools.report.page.render`. A report of a live run has the same
            fields, so that both have the same page.
        """
        summary, trace, rows = self.summary, self.trace, self.rows
        unit = summary.unit
        alarms = rows[(rows.cause != 0) & ~rows.incident_open & ~rows.skip]
        shown: dict[float, tuple[str, ...]] = {}
        for row in alarms[:MAX_ALARMS]:
            shown[row.step] = tuple(names_of(Cause(int(row.cause))))
        onsets = first_of([f"{onset:.15g}" for onset in summary.onsets], MAX_LINES)
        judged_from = ""
        if summary.judged_from is not None:
            judged_from = f"{unit} {summary.judged_from:.15g}"
        facts = {
            "Rows": f"{summary.rows:,}",
            "From": f"{unit} {summary.first_step:.15g} to {summary.last_step:.15g}",
            "Rows not judged": str(summary.unjudged or ""),
            "All detectors judge from": judged_from,
            f"Alarms begin at {unit}": onsets,
            "Rows by cause": _counts_text(summary.causes),
            "Rows by order": _counts_text(summary.actions),
            "Lowest learning rate": f"× {summary.lowest_lr:.3g}",
        }
        facts = {name: text for name, text in facts.items() if text}
        policy_toml = ""
        if isinstance(self.policy, Policy):
            policy_toml = dumps(self.policy)
        notes = [inactive_line(signal, parts) for signal, parts in summary.inactive.items()]
        if len(alarms) > len(shown):
            more = f"the plot marks the first {len(shown)}"
            notes.append(f"{len(alarms):,} alarms outside of incidents: {more}")
        return PageReport(
            title=summary.trace,
            mode=Mode.REPLAY,
            policy_name=summary.policy,
            policy_toml=policy_toml,
            fingerprint=summary.fingerprint,
            curves=thinned(_curves(trace, rows)),
            incidents=self.incidents,
            counts=Counts(
                incidents=summary.incidents,
                rollbacks=summary.rollbacks,
                skips=summary.skips,
                clips=summary.clips,
                alarms=summary.alarms,
            ),
            facts=facts,
            notes=(*notes, *first_lines(trace.problems, MAX_LINES, "not read: "), *trace.notes),
            attempts=tuple(
                RunAttempt(attempt.first_step, attempt.source) for attempt in trace.attempts
            ),
            alarms_outside=shown,
            stopped_step=summary.stopped_step,
            missing=tuple(summary.missing.values()),
        )


def replay(trace: Trace, policy: PolicyLike, *, name: str | None = None) -> Replay:
    """Replays a policy over a trace: what would it have done in this run?

        traces, unreadable = open_traces(["run.csv"])
        result = replay(traces[0], "pretraining")
        print(result.summary.incidents, result.summary.rollbacks)

    The replay follows the recorded curve. It skips, clips and cuts only in its own records, so it
    shows where a policy acts, not how the run would have continued.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: the name of a preset, a path of a TOML file, a `Policy`, or an `Engine` or its
            config.
        name: name of the policy in the results, or None for the policy's own name.

    Returns:
        The summary, the incidents, and the rows with a decision that is not neutral.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    policy = resolve(policy)
    if isinstance(policy, Engine):
        engine = policy
        name = name or "(engine)"
    else:
        engine = policy.engine()
        name = name or policy.name
    inactive = _find_inactive(engine, trace, name)
    rows = judge_trace(engine, trace)
    incidents = _find_incidents(rows)
    steps = trace.rows.step
    alarmed = rows.cause != 0
    spans = alarm_spans(alarmed, int(engine.config.incident.quiet_steps))
    onsets = tuple(float(rows.step[first]) for first, _ in spans)
    first_alarm = None
    if onsets:
        first_alarm = onsets[0]
    stops = rows.step[rows.action & int(Action.STOP) != 0]
    stopped_step = None
    if stops.size:
        stopped_step = float(stops[0])
    summary = Summary(
        trace=trace.name,
        policy=name,
        fingerprint=engine.fingerprint or "",
        rows=len(steps),
        unjudged=len(steps) - len(rows),
        first_step=float(steps[0]),
        last_step=float(steps[-1]),
        alarms=_count(alarmed),
        first_alarm=first_alarm,
        causes=_counts_by_flag(rows.cause, Cause),
        actions=_counts_by_flag(rows.action, Action),
        skips=_count(rows.skip),
        clips=_count(_clipped(rows)),
        incidents=len(incidents),
        rollbacks=sum(incident.rolled_back for incident in incidents),
        lowest_lr=shortest_decimal(rows.lr_scale.min(initial=np.float32(1))),
        stopped_step=stopped_step,
        inactive=inactive,
        problems=len(trace.problems),
        unit=trace.unit,
        judged_from=_judged_from(engine, inactive, rows),
        missing=missing_signals(trace),
        onsets=onsets,
    )
    return Replay(trace, policy, engine, rows, summary, tuple(incidents))


def _find_inactive(engine: Engine, trace: Trace, policy: str) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    passed = trace.signals & {*JUDGED_SIGNALS, *engine.needs}
    parts: list[tuple[str, Set[str]]] = []
    if engine.config.clip is not None:
        clip_needs = "grad_norm"
        if engine.per_tensor:
            clip_needs = "group_norms"
        parts.append(("clip", {clip_needs}))
    for name, detector in engine.config.detectors:
        parts.append((name, set(detector.NEEDS)))
    if all(needs - passed for _, needs in parts):
        needed = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            f"{trace.name}: policy {policy} reads {needed}, but this trace logs only "
            f"{', '.join(sorted(passed))}: pass a log with these signals, or another policy"
        )
    missing: set[str] = set()
    for _, needs in parts:
        missing |= needs - passed
    inactive: dict[str, tuple[str, ...]] = {}
    for signal in sorted(missing):
        inactive[signal] = tuple(name for name, needs in parts if signal in needs)
    return inactive


def warmups(engine: Engine) -> dict[str, int]:
    """Finds the detectors that learn a run before they can raise an alarm.

    Args:
        engine: the engine of a policy.

    Returns:
        Name of a detector -> number of rows that it learns, most rows first.
    """
    found: dict[str, int] = {}
    for name, detector in engine.config.detectors:
        rows = getattr(detector, "warmup_steps", getattr(detector, "window", None))
        if rows is not None and int(rows) > 1:
            found[name] = int(rows)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _judged_from(
    engine: Engine, inactive: Mapping[str, Sequence[str]], rows: np.recarray
) -> float | None:
    """The value of `Summary.judged_from`. Detectors do not learn rows with NaN or Inf."""
    without = set().union(*inactive.values())
    learnt = [count for name, count in warmups(engine).items() if name not in without]
    later = rows.step[np.cumsum(rows.cause & int(NONFINITE) == 0) > max(learnt, default=0)]
    if not learnt or not later.size:
        return None
    return float(later[0])


def inactive_line(signal: str, parts: Sequence[str]) -> str:
    """Describes the parts of a policy that are inactive without a signal.

    Args:
        signal: the signal that the trace does not log, for example "grad_norm".
        parts: names of the detectors that need the signal, and "clip".

    Returns:
        A sentence such as "no grad_norm logged: clip is inactive".
    """
    reason = "logged"
    if signal == "group_norms":
        reason = "in any log (AdaGC reads the norm of every tensor)"
    verb = "are"
    if len(parts) == 1:
        verb = "is"
    return f"no {signal} {reason}: {', '.join(parts)} {verb} inactive"


def _count(rows: np.ndarray) -> int:
    return int(np.count_nonzero(rows))


def _clipped(rows: np.recarray) -> np.ndarray:
    """Whether the gradient of each row is scaled down, and its step is not skipped; bool (n,)."""
    return (rows.grad_scale < 1) & ~rows.skip


def _counts_by_flag(flags: np.ndarray, kind: type[Cause] | type[Action]) -> dict[str, int]:
    """Counts the rows with each flag, without flags that no row has; flags is int (n,)."""
    counts: dict[str, int] = {}
    for flag in kind:
        count = _count(flags & int(flag))
        if count:
            counts[str(flag.name)] = count
    return counts


def _counts_text(counts: Mapping[str, int]) -> str:
    """Counts by the name of a flag as text: "loss spike 42, nonfinite loss 3"."""
    return ", ".join(f"{flags_text([name])} {count:,}" for name, count in counts.items())


def _find_incidents(rows: np.recarray) -> list[Incident]:
    """Finds the incidents. Each has the rows with an alarm from its first row to the next one's."""
    opened = np.diff(rows.incident, prepend=0) != 0
    alarmed = (rows.incident_open | rows.skip) & (rows.cause != 0)
    # An attempt ends the incident of the attempt before it.
    begins = np.flatnonzero(opened | (np.diff(rows.attempt, prepend=0) != 0)).tolist()
    incidents = []
    for start, end in itertools.pairwise([*begins, len(rows)]):
        if opened[start]:
            own = start + np.flatnonzero((opened | alarmed)[start:end])
            lr_before = np.float32(1)
            if start:
                lr_before = rows.lr_scale[start - 1]
            number = len(incidents) + 1
            incidents.append(_incident(rows[own].view(np.recarray), lr_before, number))
    return incidents


def _incident(rows: np.recarray, lr_before: np.float32, number: int) -> Incident:
    """Builds an incident from its rows, and the learning-rate multiplier before them."""
    all_orders = Action(int(np.bitwise_or.reduce(rows.action)))
    # The place of an incident is its first rollback or stop, or its last row.
    place = -1
    orders = np.flatnonzero(rows.action & int(Action.ROLLBACK | Action.STOP))
    if orders.size:
        place = orders[0]
    lr_path: tuple[float, ...] = ()
    if Action.CUT_LR in all_orders:
        lr_path = (shortest_decimal(lr_before), shortest_decimal(rows.lr_scale[-1]))
    return Incident(
        number=number,
        onset_step=float(rows.step[0]),
        step=float(rows.step[place]),
        last_step=float(rows.step[-1]),
        cause=tuple(names_of(Cause(int(np.bitwise_or.reduce(rows.cause))))),
        action=tuple(names_of(all_orders)),
        mode=Mode.REPLAY,
        skipped=_count(rows.skip),
        clipped=_count(_clipped(rows)),
        lr_path=lr_path,
    )


def _curves(trace: Trace, judged: np.recarray) -> Curves:
    """Joins the columns of a trace with the decisions on its judged rows; NaN in other rows."""
    rows = trace.rows
    threshold = np.full(len(rows.step), np.nan, np.float32)
    lr_scale = np.full(len(rows.step), np.nan, np.float32)
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
        nonfinite=nonfinite,
    )


def _number(number: float) -> float | int:
    """Converts a whole number to an int, which JSON writes without ".0"."""
    if number.is_integer():
        return int(number)
    return number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
