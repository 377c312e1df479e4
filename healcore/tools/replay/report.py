"""Builds the report of a replay, with a bounded number of points for a trace of any length."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from healcore.core.verdict import Cause, names
from healcore.events.models import EventRecord
from healcore.history import Counts, Curves, Mode
from healcore.history.curves import thin
from healcore.history.incident import MOST_ALARMS
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.policy import PolicySource, dumps, load
from healcore.tools.replay.judged import JudgedRows
from healcore.tools.replay.replayed import Replay
from healcore.tools.replay.summary import inactive_line
from healcore.tools.report.run_report import RunReport
from healcore.tools.traces import Trace


def replay_report(result: Replay, policy: PolicySource) -> RunReport:
    """Returns the report of a replay of `policy`."""
    summary, trace = result.summary, result.trace
    alarms, notes = _alarm_marks(result.judged)
    stops = () if summary.stopped_step is None else (Mark(summary.stopped_step),)
    return RunReport(
        title=summary.trace,
        mode=Mode.REPLAY,
        policy_name=summary.policy,
        policy_toml=dumps(load(policy)),
        fingerprint=summary.fingerprint,
        curves=_curves(result),
        incidents=result.incidents,
        counts=Counts(
            incidents=summary.incidents,
            rollbacks=summary.first_rollbacks,
            skips=summary.skips,
            clips=summary.clips,
            alarms=summary.alarms,
        ),
        # The fields of the summary's line of JSON, by the same names.
        facts={name: str(value) for name, value in asdict(summary).items() if value},
        notes=(
            *(inactive_line(*each) for each in summary.inactive.items()),
            *notes,
            *_trace_notes(trace),
        ),
        attempts=_attempts(trace),
        marks=(*alarms, *stops),
    )


def _curves(result: Replay) -> Curves:
    rows, judged = result.trace.rows, result.judged
    curves = {name: rows.values[name] for name in ("loss", "grad_norm") if name in rows.values}
    count = len(rows.step)
    nonfinite = np.zeros(count, bool)
    for name, curve in curves.items():
        nonfinite |= rows.logged[name] & ~np.isfinite(curve)
    for name in ("threshold", "lr_scale"):
        curves[name] = np.full(count, np.nan, np.float32)
        curves[name][judged.index] = judged.record[name]
    curves["threshold"][curves["threshold"] == 0] = np.nan  # 0 means no limit
    if np.isnan(curves["threshold"]).all():
        del curves["threshold"]
    kept = thin(np.arange(count), curves, 2000)
    curves = {name: curve[kept] for name, curve in curves.items()}
    return Curves(
        loss=curves.get("loss", np.full(len(kept), np.nan, np.float32)),
        grad_norm=curves.get("grad_norm"),
        threshold=curves.get("threshold"),
        lr_scale=curves["lr_scale"],
        rows=count,
        step=rows.step[kept],
        attempt=rows.attempt[kept],
        nonfinite=nonfinite[kept],
    )


def _alarm_marks(judged: JudgedRows) -> tuple[list[Mark], list[str]]:
    """Returns marks of the first alarms outside of incidents, and a note if there are more."""
    record = judged.record
    rows = np.flatnonzero((record.cause != 0) & ~record.incident_open & ~record.skip)
    marks = [
        Mark(
            float(judged.step[row]),
            EventRecord(kind="alarm", cause=names(Cause(int(record.cause[row])))),
        )
        for row in rows[:MOST_ALARMS]
    ]
    if len(marks) == rows.size:
        return marks, []
    first = f"the plot marks the first {len(marks)}"
    return marks, [f"{rows.size:,} alarms outside of incidents: {first}"]


def _trace_notes(trace: Trace) -> list[str]:
    """Returns the problems and notes of a trace as text, problems first."""
    more = len(trace.problems) - 100
    lines = [*trace.problems[:100], *([f"and {more:,} more problems"] if more > 0 else [])]
    return [*lines, *trace.notes]


def _attempts(trace: Trace) -> tuple[RunAttempt, ...]:
    if len(trace.attempts) < 2:
        return ()
    return tuple(
        RunAttempt(attempt.number, attempt.first_step, AttemptOrigin.RECORDED, attempt.source)
        for attempt in trace.attempts
    )
