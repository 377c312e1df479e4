"""Reads reports from the files of runs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from healcore.core.errors import HealcoreError
from healcore.events import read
from healcore.events.metrics import path_next_to
from healcore.events.models import EventRecord
from healcore.history import Curves, Mode, Run, runs_of
from healcore.history.curves import read_metrics, thinned
from healcore.history.incident import count_incidents
from healcore.history.process import RunState
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.sentences import STATES, sentence
from healcore.tools.report.run_report import MAX_LINES, RunReport, first_lines

_NO_CURVES = Curves(np.zeros(0), np.zeros(0))
_WITHOUT_METRICS = "There are no metrics: logging=Logging(metrics=...) writes run.metrics.jsonl."


class ReportError(HealcoreError, ValueError):
    """A file has no report. The message has the file, the rule and the remedy."""


def read_reports(events: str | os.PathLike[str]) -> list[RunReport]:
    """Reads a report on each run in an events file, or in the only events file of a directory.

    The curves are those of `run.metrics.jsonl` next to `run.events.jsonl`.

    Raises:
        ReportError: the file has no event or cannot be read.
    """
    path = find_events(Path(events))
    try:
        history = read(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    damage = [f"line {line}: {problem}" for line, problem in history.problems]
    if not history.events:
        raise ReportError(
            f"{path} has no event; {damage[0] if damage else 'it is empty'}. An events file has "
            'one JSON object per line, with "schema", "seq", "run" and "kind" (docs/events.md). '
            "For a training log type `healcore probe loss` or `healcore replay --report`"
        )
    runs = runs_of(history.runs())
    notes = first_lines(f"{path.name}: damaged", damage)
    reports = []
    for run in runs:
        report = _report_on(path, run)
        title = f"{report.title} · {run.processes[0].id}" if len(runs) > 1 else report.title
        reports.append(report._replace(title=title, notes=(*notes, *report.notes)))
    return reports


def find_events(path: Path) -> Path:
    """Returns a file itself, or the only events file in a directory. Raises ReportError."""
    if not path.is_dir():
        return path
    files = sorted(path.glob("*events.jsonl"))
    if len(files) == 1:
        return files[0]
    found = ", ".join(file.name for file in files) or "none"
    raise ReportError(
        f"{path} must have one events file (*events.jsonl) and has {found}: name the file of "
        "logging=Logging(events=...)"
    )


def _report_on(path: Path, run: Run) -> RunReport:
    written, problem = _read_postmortem(path, run.processes[-1].id)
    run.add_postmortem(written)
    curves, curve_notes = _read_curves(path_next_to(path), run)
    start = run.start or EventRecord()
    clips, diagnosis = written.get("clips"), written.get("diagnosis")
    state = _state_of(run, written)
    malformed = [
        f"event {event.seq} ({event.kind}): {', '.join(fields)}" for event, fields in run.malformed
    ]
    problems = [f"step {event.step}: {event.problem}" for event in run.problems]
    lost = [f"{run.lost} events are lost, because writing to the disk failed."] if run.lost else []
    return RunReport(
        title="/".join(path.absolute().parts[-2:]),
        mode=Mode.OBSERVE if run.observes else Mode.HEAL,
        policy_name=start.policy or "unknown",
        policy_toml=start.policy_toml or "",
        fingerprint=start.fingerprint or "",
        curves=curves,
        incidents=tuple(run.incidents),
        counts=count_incidents(
            run.incidents,
            alarms=run.alarms + run.unreported_alarms,
            skips=run.skips,
            undone_skips=run.undone_skips,
            clips=clips if type(clips) is int else None,
        ),
        facts=_facts(run, state, written),
        state=state,
        notes=(
            *first_lines("fields of the wrong type, ignored", malformed),
            *filter(None, (problem, *curve_notes)),
            *lost,
            *first_lines("reported by the run", problems),
        ),
        attempts=tuple(run.attempts),
        marks=tuple(run.marks),
        diagnosis=diagnosis if isinstance(diagnosis, str) else run.processes[-1].diagnosis,
    )


def _read_curves(path: Path, run: Run) -> tuple[Curves, list[str]]:
    """Returns the curves of a run, and notes."""
    try:
        rows, damage = read_metrics(path, [process.id for process in run.processes])
    except FileNotFoundError:
        return _NO_CURVES, [_WITHOUT_METRICS]
    except OSError as error:
        why = f"{path}: the metrics cannot be read: {error.strerror or error}"
        return _NO_CURVES, [why]
    notes = first_lines(f"{path.name}: damaged", damage)
    if not len(rows.step):
        return _NO_CURVES, [*notes, _WITHOUT_METRICS]
    return thinned(rows), notes


def _read_postmortem(events: Path, run: str) -> tuple[dict[str, Any], str]:
    """Returns the postmortem next to an events file or {}, and a problem or an empty string."""
    path = postmortem.path_for(events, run)
    try:
        written = postmortem.read(path)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {type(error).__name__}"
    is_valid = isinstance(written, dict)
    return (written, "") if is_valid else ({}, f"{path.name} is not a postmortem")


def _state_of(run: Run, written: dict[str, Any]) -> RunState:
    """Returns the state by the events or, after a kill, by the postmortem of the next process."""
    if run.end is not None or not written:
        return run.state
    ending = written.get("ending")
    return RunState(ending) if ending in set(RunState) else RunState.ENDED


def _facts(run: Run, state: RunState, written: dict[str, Any]) -> dict[str, str]:
    start = run.start or EventRecord()
    first = next((process.start for process in run.processes if process.start), None)
    ends = [process.end for process in run.processes if process.end]
    seconds = [process.seconds for process in run.processes if process.seconds is not None]
    versions = start.environment or {}
    framework = (start.framework, versions.get(start.framework or ""))
    faults = [f"step {f.step}: {sentence(f).removeprefix('fault: ')}" for f in run.faults]
    facts = {
        "Ending": STATES[state],
        "Run": ", ".join(process.id for process in run.processes),
        "Framework": " ".join(part for part in framework if part),
        "Mode": start.mode,
        "Started": _time_of(first),
        "Last event": _time_of(run.processes[-1].last),
        "Duration": f"{timedelta(seconds=round(min(sum(seconds), 1e9)))}" if seconds else None,
        "Faults": "; ".join(faults[:MAX_LINES]),
        "Step at the end": ends[-1].step if ends else written.get("step"),
        "Last known-good": written.get("last_good") if run.last_good is None else run.last_good,
        "Saved every": None if start.save_every is None else f"{start.save_every} steps",
        "Checkpoints": start.store,
        "Host": start.host,
        "Processes": None if start.world == 1 else start.world,
        "healcore": versions.get("healcore"),
        "Python": versions.get("python"),
    }
    return {label: str(value) for label, value in facts.items() if value not in (None, "")}


def _time_of(event: EventRecord | None) -> str | None:
    if event is None or event.time is None:
        return None
    return f"{event.time[:10]} {event.time[11:19]} UTC"
