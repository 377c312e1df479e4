"""Takes a run's curves from its metrics file, another log of it, or its alarms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from healcore import regular_file
from healcore.core.errors import HealcoreError
from healcore.history import Curves, Incident, Run
from healcore.history.curves import MetricCounts, gather
from healcore.history.metrics import (
    CURVES,
    MetricRow,
    MetricRows,
    MetricsReader,
    curve_values,
    parse_metrics,
    stack,
)
from healcore.history.run import AttemptOrigin, RunAttempt
from healcore.runtime.events.json_lines import lines_of
from healcore.tools.traces import TraceError, open_traces

_LISTED = 20


class MetricsError(HealcoreError, ValueError):
    """A metrics file that cannot be read."""


class RunCurves(NamedTuple):
    """The curves of a run, and the data that depend on them."""

    curves: Curves
    incidents: tuple[Incident, ...]
    """Each with the rows of the curves in which it is."""
    attempts: tuple[RunAttempt, ...]
    notes: tuple[str, ...]
    counted: MetricCounts | None = None
    """Counts of the metrics; None: there are none, or not of all optimizers."""


def curves_of(run: Run, metrics: Path | None) -> RunCurves:
    """The curves of a run, without `metrics` from its alarms; MetricsError if it is unreadable."""
    if metrics is None:
        return _from_alarms(
            run,
            "There is no metrics file: the points are the steps with an alarm, and between them "
            "nothing is known. The argument metrics= of Healer, heal and LightningHealingCallback "
            "writes one; a run with HealingCallback has its losses in the Trainer's own log: "
            "--metrics trainer_state.json",
        )
    try:
        return _from_lines(run, metrics) if _is_ours(metrics) else _from_trace(run, metrics)
    except (OSError, TraceError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MetricsError(f"{metrics}: the metrics cannot be read: {why}") from error


def first_lines(what: str, found: Iterable[str], count: int | None = None) -> list[str]:
    """The first few lines, each after `what`, and how many more there are.

    `count` is the number of all lines, if `found` does not have all.
    """
    every = list(found)
    more = (len(every) if count is None else count) - len(every[:_LISTED])
    lines = [f"{what}: {line}" for line in every[:_LISTED]]
    return lines + ([f"{what}: {more} more"] if more > 0 else [])


def _is_ours(path: Path) -> bool:
    """Whether a Healer has written a file: by its first lines, one of which may be torn."""
    with open(path, "rb", opener=regular_file.opener) as file:
        first = list(itertools.islice(lines_of(file), 5))
    return any(not isinstance(parse_metrics(line), str) for line in first)


def _from_lines(run: Run, path: Path) -> RunCurves:
    ours = MetricsReader(path, run.attempt_ids)
    curves, incidents, counted = gather(ours.chunks(), run.incidents)
    notes = first_lines(f"{path.name}: damaged", ours.problems, ours.damaged)
    if not curves.rows:
        what = f"{path.name} has no line of this run ({ours.others} are of others): the points are"
        found_curves = _from_alarms(run, f"{what} the steps with an alarm.")
        return found_curves._replace(notes=(*notes, *found_curves.notes))
    if ours.left_out:
        others = ", ".join(sorted(ours.left_out))
        notes.append(f"The curves are those of the optimizer {ours.engine}; not of {others}.")
    more = range(len(run.attempt_ids), len(ours.ids))
    attempts = (RunAttempt(number, 0.0, AttemptOrigin.METRICS) for number in more)
    counted = None if ours.left_out else counted
    return RunCurves(curves, incidents, (*run.attempts, *attempts), tuple(notes), counted)


def _from_trace(run: Run, path: Path) -> RunCurves:
    """Any other log of the run: loss and norm, without the policy's numbers."""
    traces, unreadable = open_traces([str(path)])
    if unreadable:
        raise TraceError(unreadable[0].problem)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise TraceError(f"more than one run in it ({names}): export the one of these events")
    survey = traces[0].survey()
    problems = [str(problem) for problem in survey.problems]
    notes = first_lines(f"{path.name}: damaged", problems, survey.problem_count)

    begins = np.array([incident.onset_step for incident in run.incidents])
    steps: set[float] = set()

    def chunks() -> Iterator[MetricRows]:
        for rows in traces[0].rows():
            steps.update(rows.step[np.isin(rows.step, begins)].tolist())
            nothing = np.full(len(rows.index), np.nan, np.float32)
            values = {name: rows.values.get(name, nothing) for name in CURVES}
            bad = np.zeros(len(rows.index), bool)
            for name in {"loss", "grad_norm"} & set(rows.given):
                bad |= rows.given[name] & ~np.isfinite(rows.values[name])
            yield MetricRows(rows.step, np.full(len(rows.index), rows.attempt), values, bad)

    curves, incidents, _ = gather(chunks(), run.incidents)
    wanted = {incident.onset_step for incident in incidents}
    if wanted and not wanted & steps:
        notes.append(
            f"{path.name} has none of the steps at which an incident begins: it may be the log of "
            "another run."
        )
    return RunCurves(curves, incidents, tuple(run.attempts), tuple(notes))


def _from_alarms(run: Run, why: str) -> RunCurves:
    """The values of the alarms: the last finite loss and norm, at single steps."""
    rows, bad = [], []
    for point in run.points:
        lr_scale = float("nan") if point.lr_scale is None else point.lr_scale
        values = curve_values({**point.readings._asdict(), "lr_scale": lr_scale})
        rows.append(MetricRow(point.step, point.attempt, values))
        bad.append(point.nonfinite)
    chunks = [stack(rows)._replace(nonfinite=np.array(bad))] if rows else []
    curves, incidents, _ = gather(chunks, run.incidents)
    return RunCurves(curves._replace(isolated=True), incidents, tuple(run.attempts), (why,))
