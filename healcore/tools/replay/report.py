"""Builds the report of a replay, with a bounded number of points for a trace of any length."""

from __future__ import annotations

import numpy as np

from healcore.core.verdict import Cause, names
from healcore.events.models import EventRecord
from healcore.history import Counts, Curves, Mode
from healcore.history.curves import Envelope
from healcore.history.incident import MOST_ALARMS
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.policy import PolicySource, dumps, load
from healcore.tools.replay.summary import JudgedRows, Summary, inactive_line
from healcore.tools.replay.trace_replay import Replay
from healcore.tools.report.run_report import RunReport
from healcore.tools.traces import Rows, Trace

_CURVES = ("loss", "grad_norm")
_MAX_COLUMN_ROWS = 50_000
_UNHELPED = "if rollbacks had not helped"


class ReplayReport:
    """Collects a replay's curves chunk by chunk; pass `add` to `replay(on_chunk=...)`."""

    def __init__(self) -> None:
        self._envelope = Envelope()
        # Columns that are not float32, for the rows that the envelope may still keep.
        self._columns = {
            "index": np.zeros(0, np.int64),
            "step": np.zeros(0),
            "attempt": np.zeros(0, np.int64),
            "nonfinite": np.zeros(0, bool),
        }
        self._alarms: list[Mark] = []
        """The first alarms outside of incidents."""
        self._alarm_count = 0

    def add(self, rows: Rows, judged: JudgedRows) -> None:
        """Adds one chunk."""
        places = np.searchsorted(rows.index, judged.index)
        curves = {name: rows.values[name] for name in _CURVES if name in rows.values}
        nonfinite = [rows.logged[name] & ~np.isfinite(rows.values[name]) for name in curves]
        for name in ("threshold", "lr_scale"):
            curve = np.full(len(rows.index), np.nan, np.float32)
            curve[places] = getattr(judged.record, name)
            curves[name] = curve
        curves["threshold"][curves["threshold"] == 0] = np.nan  # 0 means no limit
        self._envelope.add(rows.index, curves)
        count = len(rows.index)
        added = {
            "index": rows.index,
            "step": rows.step,
            "attempt": np.full(count, rows.attempt, np.int64),
            "nonfinite": np.any(nonfinite, axis=0) if nonfinite else np.zeros(count, bool),
        }
        self._columns = {
            name: np.concatenate((column, added[name])) for name, column in self._columns.items()
        }
        self._mark_alarms(judged)
        if len(self._columns["index"]) > _MAX_COLUMN_ROWS:
            self._thin(self._envelope.thinned()[0])

    def _mark_alarms(self, judged: JudgedRows) -> None:
        record = judged.record
        rows = np.flatnonzero((record.cause != 0) & ~record.incident_open & ~record.skip)
        self._alarm_count += rows.size
        for row in rows[: MOST_ALARMS - len(self._alarms)]:
            event = EventRecord(kind="alarm", cause=names(Cause(int(record.cause[row]))))
            self._alarms.append(Mark(float(judged.step[row]), event))

    def finish(
        self, result: Replay, policy: PolicySource, notes: tuple[str, ...] = ()
    ) -> RunReport:
        """Returns the report of the finished replay `result` of `policy`, with added notes."""
        index, curves = self._envelope.thinned()
        self._thin(index)
        threshold = curves.get("threshold")
        if threshold is not None and np.isnan(threshold).all():
            threshold = None
        summary = result.summary
        if self._alarm_count > len(self._alarms):
            marked = f"the plot marks the first {len(self._alarms)}"
            notes = (f"{self._alarm_count:,} alarms outside of incidents: {marked}", *notes)
        return RunReport(
            title=summary.trace,
            mode=Mode.REPLAY,
            policy_name=summary.policy,
            policy_toml=dumps(load(policy)),
            fingerprint=summary.fingerprint,
            curves=Curves(
                loss=curves.get("loss", np.full(len(index), np.nan, np.float32)),
                grad_norm=curves.get("grad_norm"),
                threshold=threshold,
                lr_scale=curves.get("lr_scale"),
                rows=summary.rows,
                step=self._columns["step"],
                index=self._columns["index"],
                attempt=self._columns["attempt"],
                nonfinite=self._columns["nonfinite"],
            ),
            incidents=result.incidents,
            counts=Counts(
                incidents=summary.incidents,
                rollbacks=summary.first_rollbacks,
                repeats=summary.repeats,
                denied=summary.spent,
                stops=sum(incident.stopped for incident in result.incidents),
                skips=summary.skips,
                clips=summary.clips,
                alarms=summary.alarms,
            ),
            facts=facts(summary, result.backend),
            notes=(*(inactive_line(*each) for each in summary.inactive.items()), *notes),
            attempts=_attempts(summary),
            marks=(
                *self._alarms,
                *(() if summary.stopped_step is None else (Mark(summary.stopped_step),)),
            ),
        )

    def _thin(self, index: np.ndarray) -> None:
        keep = np.isin(self._columns["index"], index)
        self._columns = {name: column[keep] for name, column in self._columns.items()}


def facts(summary: Summary, backend: str) -> dict[str, str]:
    """Returns the counts as text, by name."""
    lowest = f"{summary.lowest_lr_first:g}"
    if summary.lowest_lr < summary.lowest_lr_first:
        lowest += f", or {summary.lowest_lr:g} {_UNHELPED}"
    shown = {
        "rows": f"{summary.rows:,}",
        "steps": f"{summary.first_step:.15g} to {summary.last_step:.15g}",
        "incidents": str(summary.incidents),
        "rollbacks": _and_repeats(summary.first_rollbacks, summary.repeats)
        + (f", {summary.spent} beyond the budget" if summary.spent else ""),
        "steps skipped": f"{summary.skips:,}",
        "steps clipped": f"{summary.clips:,}",
        "cuts of the learning rate": _and_repeats(summary.first_cuts, summary.repeat_cuts),
        "smallest learning-rate multiplier": lowest,
        "judged with": backend,
    }
    if summary.unjudged:
        shown["rows without a loss and a gradient norm"] = f"{summary.unjudged:,}"
    if summary.problems:
        shown["lines that could not be read"] = f"{summary.problems:,}"
    return shown


def _and_repeats(firsts: int, repeats: int) -> str:
    return f"{firsts}, and {repeats} more {_UNHELPED}" if repeats else str(firsts)


def survey_notes(trace: Trace) -> tuple[str, ...]:
    """Returns the problems and notes of a trace as text, problems first."""
    survey = trace.survey()
    lines = [str(finding) for finding in (*survey.problems, *survey.notes)]
    more = survey.problem_count + survey.note_count - len(lines)
    return (*lines, *([f"and {more:,} more"] if more else []))


def _attempts(summary: Summary) -> tuple[RunAttempt, ...]:
    if len(summary.attempts) < 2:
        return ()
    return tuple(
        RunAttempt(attempt.number, attempt.first_step, AttemptOrigin.RECORDED, attempt.source)
        for attempt in summary.attempts
    )
