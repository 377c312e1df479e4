"""From the files of runs to their reports."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.history import Mode, Run, runs_of
from healcore.history.incident import counts_of
from healcore.history.metrics import parse_metrics
from healcore.policy import Policy
from healcore.runtime.events import History, read
from healcore.runtime.events.json_lines import first_line
from healcore.runtime.events.metrics import path_next_to, stem
from healcore.tools.report import facts
from healcore.tools.report.report import RunReport
from healcore.tools.report.sources import MetricsError, curves_of, listed


class ReportError(HealcoreError, ValueError):
    """A file that no report can be made of: the file, the rule, what to write instead."""


class Reports(NamedTuple):
    """What the files of some runs have."""

    reports: list[RunReport]
    """One for each training run in the file, however many processes it took."""
    problems: list[str]
    """Damage in the files, and what is missing; each is in the notes of its report too."""
    unreadable: str
    """Why the metrics could not be read at all; empty: they were, or there are none."""


def read_reports(
    events: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
) -> Reports:
    """The reports of the runs in an events file.

    Args:
        events: the file, or a directory with one.
        metrics: of the same run; None: the file beside it, `run.metrics.jsonl` of
            `run.events.jsonl`, if there is one. Any trace that `healcore replay` reads will do.
        policy: of the run; None: the preset of that name, if the run had just that.

    Raises:
        ReportError: there is no event in the file, or it cannot be read.
    """
    path = find_events(Path(events))
    history = _read(path)
    found = runs_of(history.runs())
    source = path_next_to(path) if metrics is None else Path(metrics)
    if metrics is None and not source.is_file():
        source = None
    damage = [f"line {each.line}: {each.problem}" for each in history.problems]
    notes = listed(f"{path.name}: damaged", damage)
    unreadable = ""
    reports = []
    for run in found:
        try:
            report = _report(path, run, source, policy)
        except MetricsError as error:
            unreadable, source = str(error), None
            notes.append(unreadable)
            report = _report(path, run, source, policy)
        title = f"{report.title} · {run.processes[0].id}" if len(found) > 1 else report.title
        reports.append(report._replace(title=title, notes=(*notes, *report.notes)))
    problems = list(dict.fromkeys(note for report in reports for note in report.notes))
    return Reports(reports, problems, unreadable)


def find_events(path: Path) -> Path:
    """The events file; in a directory the only one there.

    Raises:
        ReportError: there is none, or more than one.
    """
    if not path.is_dir():
        return path
    found = sorted(path.glob("*events.jsonl"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ReportError(
            f"{path}: no events file (*events.jsonl) in this directory; "
            'name the file that Healer(events="run.events.jsonl") has written'
        )
    names = ", ".join(each.name for each in found)
    raise ReportError(f"{path}: more than one events file ({names}): name one of them")


def _read(path: Path) -> History:
    try:
        history = read(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    if history.events:
        return history
    first = first_line(path)
    if first is None:
        raise ReportError(f"{path} is empty: a run's first event comes at its start")
    if not isinstance(parse_metrics(first), str):
        raise ReportError(
            f"{path} is a metrics file, and a report begins with the events: "
            f"write healcore report {stem(path)}.events.jsonl --metrics {path.name}"
        )
    where = history.problems[0]
    raise ReportError(
        f"{path} has no event in it; line {where.line}: {where.problem}. An events file has one "
        'JSON object per line, with "schema", "seq", "run" and "kind" (docs/events.md)'
    )


def _report(path: Path, run: Run, metrics: Path | None, policy: Policy | None) -> RunReport:
    malformed = [
        f"event {each.seq} ({each.kind}): {', '.join(each.fields)} not as agreed"
        for each in run.malformed
    ]
    notes = listed("fields left out, not in their shape", malformed)
    postmortem, trouble = facts.postmortem_of(path, run.processes[-1].id)
    notes += [trouble] if trouble else []
    drawn = curves_of(run, metrics)
    ran = facts.policy_of(run.start, policy)
    notes += [*drawn.notes, *([ran.note] if ran.note else [])]
    notes += _missing(run, counted=drawn.counted is not None)
    counted = drawn.counted
    return RunReport(
        title="/".join(path.absolute().parts[-2:]),  # run.events.jsonl alone names no run
        mode=Mode.OBSERVE if run.observes else Mode.HEAL,
        policy_name=ran.name,
        policy_toml=ran.toml,
        fingerprint=ran.fingerprint,
        curves=drawn.curves,
        incidents=drawn.incidents,
        counts=counts_of(
            drawn.incidents,
            alarms=max(run.alarms, counted.alarms if counted else 0),
            skips=max(run.skips, counted.skips if counted else 0),
            clips=counted.clips if counted else None,
        ),
        facts=facts.facts_of(run, postmortem),
        state=facts.state_of(run, postmortem),
        notes=tuple(notes),
        attempts=drawn.attempts,
        marks=tuple(run.marks),
        diagnosis=_diagnosis(run, postmortem),
    )


def _diagnosis(run: Run, postmortem: dict[str, Any] | None) -> str:
    written = (postmortem or {}).get("diagnosis")
    return written if isinstance(written, str) else run.processes[-1].diagnosis


def _missing(run: Run, *, counted: bool) -> list[str]:
    """What the run itself could not write, or not in full."""
    notes = []
    if run.lost:
        notes.append(f"{run.lost} events could not be written by the run (a disk that failed).")
    if run.unreported_alarms:
        where = "the metrics have them" if counted else "they count in no column here"
        notes.append(f"{run.unreported_alarms} alarms got no event of their own: {where}.")
    problems = [f"step {event.step}: {event.problem}" for event in run.problems]
    return notes + listed("reported by the run", problems)
