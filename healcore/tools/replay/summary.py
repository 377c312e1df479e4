"""Summarizes the decisions of one replay: counts and incidents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from healcore.console import listed
from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.tools.replay.judged import JudgedRows
from healcore.tools.traces import Trace


def shortest(number: np.float32) -> float:
    """Converts a float32 to the float with the fewest digits: 0.1, not 0.10000000149011612."""
    return float(str(number))


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
