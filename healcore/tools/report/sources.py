"""Where a run's curves come from: its metrics file, another log of it, or its alarms."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError
from healcore.runtime.events.reading import lines
from healcore.tools.report import metric_lines
from healcore.tools.report.casebook import Casebook
from healcore.tools.report.curves import gather
from healcore.tools.report.metric_lines import CURVES, Chunk, Lines
from healcore.tools.report.story import Incident, Part, Series
from healcore.tools.report.tally import Tally
from healcore.tools.traces import TraceError, open_traces

_TOLD = 20
"""Problems of one kind that are told one by one."""


class MetricsError(HealcoreError, ValueError):
    """A metrics file that cannot be read."""


class Drawn(NamedTuple):
    """The curves, and what depends on them."""

    series: Series
    incidents: tuple[Incident, ...]
    """With the rows in which they are."""
    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    """What is missing or damaged."""
    tally: Tally | None = None
    """What the metrics have counted; None: they have not, or not of all optimizers."""


def curves_of(book: Casebook, metrics: Path | None) -> Drawn:
    """The curves of a run.

    Args:
        book: its incidents and attempts.
        metrics: the file; None: there is none.

    Raises:
        MetricsError: the file cannot be read.
    """
    if metrics is None:
        return _from_alarms(
            book,
            "There is no metrics file: the points are the steps with an alarm, and between them "
            'nothing is known. Healer(metrics="run.metrics.jsonl") writes one.',
        )
    try:
        return _from_lines(book, metrics) if _is_ours(metrics) else _from_trace(book, metrics)
    except (OSError, TraceError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise MetricsError(f"{metrics}: the metrics cannot be read: {why}") from error


def listed(what: str, found: Iterable[str], count: int | None = None) -> list[str]:
    """The first few of many lines, and how many more there are.

    Args:
        what: said before each.
        found: the lines.
        count: how many there are in all, if `found` has not all of them.
    """
    told = list(found)
    more = (len(told) if count is None else count) - len(told[:_TOLD])
    lines = [f"{what}: {line}" for line in told[:_TOLD]]
    return lines + ([f"{what}: {more} more"] if more > 0 else [])


def _is_ours(path: Path) -> bool:
    """Whether a file is a Healer's: by its first lines, one of which may be torn."""
    with path.open("rb") as file:
        first = list(itertools.islice(lines(file), 5))
    return any(not isinstance(metric_lines.parse(line), str) for line in first)


def _from_lines(book: Casebook, path: Path) -> Drawn:
    ours = Lines(path, book.ids)
    series, incidents, tally = gather(ours.chunks(), book.incidents, book.capped)
    notes = listed(f"{path.name}: damaged", ours.problems, ours.damaged)
    if not series.rows:
        what = f"{path.name} has no line of this run ({ours.others} are of others): the points are"
        drawn = _from_alarms(book, f"{what} the steps with an alarm.")
        return drawn._replace(notes=(*notes, *drawn.notes))
    if ours.left_out:
        others = ", ".join(sorted(ours.left_out))
        notes.append(f"The curves are those of the optimizer {ours.engine}; not of {others}.")
    more = range(len(book.ids), len(ours.ids))
    parts = (Part(number, 0.0, "not told by an event") for number in more)
    counted = None if ours.left_out else tally
    return Drawn(series, incidents, (*book.parts, *parts), tuple(notes), counted)


def _from_trace(book: Casebook, path: Path) -> Drawn:
    """Any other log of the run: loss and norm, without the policy's numbers."""
    traces, unreadable = open_traces([str(path)])
    if unreadable:
        raise TraceError(unreadable[0].problem)
    if len(traces) > 1:
        names = ", ".join(trace.name for trace in traces)
        raise TraceError(f"more than one run in it ({names}): export the one of these events")
    survey = traces[0].survey()
    told = [str(problem) for problem in survey.problems]
    notes = listed(f"{path.name}: damaged", told, survey.problem_count)

    begins = np.array([case.onset_step for case in book.incidents])
    steps: set[float] = set()

    def chunks() -> Iterator[Chunk]:
        for rows in traces[0].rows():
            steps.update(rows.step[np.isin(rows.step, begins)].tolist())
            nothing = np.full(len(rows.index), np.nan, np.float32)
            values = {name: rows.values.get(name, nothing) for name in CURVES}
            bad = np.zeros(len(rows.index), bool)
            for name in {"loss", "grad_norm"} & set(rows.given):
                bad |= rows.given[name] & ~np.isfinite(rows.values[name])
            yield Chunk(rows.step, np.full(len(rows.index), rows.attempt), values, bad)

    series, incidents, _ = gather(chunks(), book.incidents)
    wanted = {case.onset_step for case in incidents}
    if wanted and not wanted & steps:
        notes.append(
            f"{path.name} has none of the steps at which an incident begins: it may be the log of "
            "another run."
        )
    return Drawn(series, incidents, book.parts, tuple(notes))


def _from_alarms(book: Casebook, why: str) -> Drawn:
    """What the alarms tell of the curves: the last finite loss and norm, at single steps."""
    rows, bad = [], []
    for attempt, event in book.alarms:
        if event["step"] is not None and "readings" in event:
            told = {**event["readings"], "lr_scale": event.get("lr_scale", "nan")}
            row = float(event["step"]), attempt, metric_lines.numbers(told)
            rows.append(metric_lines.Row(*row))
            bad.append("NONFINITE" in " ".join(event.get("cause", ())))
    chunks = [metric_lines.chunk(rows)._replace(nonfinite=np.array(bad))] if rows else []
    series, incidents, _ = gather(chunks, book.incidents)
    return Drawn(series._replace(lonely=True), incidents, book.parts, (why,))
