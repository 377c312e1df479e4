"""Reads the curves of a run from its metrics file, from another log of the run, or from alarms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from healcore import regular_file
from healcore.events.json_lines import iter_lines
from healcore.history import Run
from healcore.history.curves import RunCurves, compute_curves
from healcore.history.metrics import MetricsReader, RowCollector, parse_metrics
from healcore.history.run import AttemptOrigin, RunAttempt
from healcore.tools.traces import TraceError, open_traces

_MAX_LINES = 20
_POINTS = "the points are the steps with an alarm"
_WITHOUT_METRICS = (
    f"There is no metrics file: {_POINTS}, and other steps are unknown. The argument metrics= of "
    "Healer, heal and LightningHealingCallback writes one"
)


def read_curves(run: Run, metrics: Path | None) -> RunCurves:
    """Returns the curves of a run, from its metrics or else from its alarms."""
    if metrics is None:
        return _from_alarms(run, _WITHOUT_METRICS)
    try:
        is_ours = _is_metrics_file(metrics)
        return _from_metrics(run, metrics) if is_ours else _from_trace(run, metrics)
    except (OSError, TraceError) as error:
        why = getattr(error, "strerror", None) or str(error)
    unreadable = f"{metrics}: the metrics cannot be read: {why}"
    return _from_alarms(run, unreadable, _WITHOUT_METRICS)._replace(unreadable=unreadable)


def first_lines(prefix: str, lines: Sequence[str], count: int | None = None) -> list[str]:
    """Returns the first few lines, each with the prefix, and a line with the number of the others.

    `count` is the total number of lines, or None for the length of `lines`.
    """
    more = (len(lines) if count is None else count) - len(lines[:_MAX_LINES])
    shown = [f"{prefix}: {line}" for line in lines[:_MAX_LINES]]
    return shown + ([f"{prefix}: {more} more"] if more > 0 else [])


def _is_metrics_file(path: Path) -> bool:
    """Whether one of the first lines is a metrics line. The very first line may be torn."""
    with open(path, "rb", opener=regular_file.opener) as file:
        first = list(itertools.islice(iter_lines(file), 5))
    return any(not isinstance(parse_metrics(line), str) for line in first)


def _from_metrics(run: Run, path: Path) -> RunCurves:
    reader = MetricsReader(path, run.attempt_ids)
    computed = compute_curves(run, reader.read())
    notes = first_lines(f"{path.name}: damaged", reader.problems, reader.damaged_lines)
    if not computed.curves.rows:
        lines = f"no line of this run, and {reader.foreign_lines} lines of other runs"
        return _from_alarms(run, *notes, f"{path.name} has {lines}: {_POINTS}.")
    if reader.ignored_engines:
        others = ", ".join(sorted(reader.ignored_engines))
        notes.append(f"The curves show the optimizer {reader.engine}, not {others}.")
    more = range(len(run.attempt_ids), len(reader.ids))
    attempts = (RunAttempt(number, 0.0, AttemptOrigin.METRICS) for number in more)
    return computed._replace(
        attempts=(*computed.attempts, *attempts),
        counts=None if reader.ignored_engines else computed.counts,
        notes=tuple(notes),
    )


def _from_trace(run: Run, path: Path) -> RunCurves:
    """Returns the curves in any other log of the run, without the policy's numbers."""
    traces, unreadable = open_traces([str(path)])
    if unreadable:
        raise TraceError(unreadable[0].problem)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise TraceError(f"the log has several runs ({names}): export only the run of these events")
    survey = traces[0].survey()
    problems = list(map(str, survey.problems))
    notes = first_lines(f"{path.name}: damaged", problems, survey.problem_count)
    collected = RowCollector()
    for rows in traces[0].rows():
        names = {"loss", "grad_norm"} & set(rows.logged)
        for row, step in enumerate(rows.step.tolist()):
            logged = {
                name: float(rows.values[name][row]) for name in names if rows.logged[name][row]
            }
            collected.add(rows.attempt, {"step": step, **logged})
    rows = collected.rows()._replace(flags=None)
    onsets = [incident.onset_step for incident in run.incidents]
    if onsets and not np.isin(onsets, rows.step).any():
        notes.append(
            f"{path.name} lacks the steps at which incidents begin: it may be of another run."
        )
    return compute_curves(run, rows)._replace(notes=tuple(notes))


def _from_alarms(run: Run, *notes: str) -> RunCurves:
    """Returns the curves at the steps with an alarm: the last finite loss and norm."""
    collected, nonfinite = RowCollector(), []
    for attempt, event in run.points:
        assert event.readings is not None
        values = {"step": event.step, "lr_scale": event.lr_scale, **event.readings.model_dump()}
        collected.add(attempt, values)
        nonfinite.append(any("NONFINITE" in name for name in event.cause or ()))
    rows = collected.rows()._replace(nonfinite=np.array(nonfinite, bool), flags=None)
    computed = compute_curves(run, rows)
    return computed._replace(curves=computed.curves._replace(isolated=True), notes=notes)
