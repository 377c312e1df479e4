"""Reads the reports on runs from their files."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from healcore.console import counted, first_lines, first_of
from healcore.core.errors import HealcoreError
from healcore.events import read
from healcore.events.kinds import sentence
from healcore.events.log import metrics_path, stem
from healcore.events.models import Ending, EventRecord
from healcore.history import Counts, Curves, Mode, RunHistory, runs_of
from healcore.history.curves import read_metrics, thinned
from healcore.runtime.reporting import postmortem
from healcore.tools.report.page_report import MAX_LINES, PageReport, ending_text

_NO_CURVES = Curves(np.zeros(0), np.zeros(0))
_WITHOUT_METRICS = "There are no metrics: logging=Logging(metrics=...) writes run.metrics.jsonl."


class ReportError(HealcoreError, ValueError):
    """A file has no report. The message has the file, the rule and the remedy.

    For example, the file is a training log instead of an events file, or a directory has the events
    files of two runs. Damage inside an events file raises no error, but becomes a note of the
    report.
    """


def read_reports(events: str | os.PathLike[str]) -> list[PageReport]:
    """Reads a report on each run in an events file, or in the only events file of a directory.

        reports = read_reports("runs/7")
        Path("report.html").write_text(page.render(reports), encoding="utf-8")

    The curves are from `run.metrics.jsonl` next to `run.events.jsonl`. Damaged or missing data are
    notes in the report, because the page of a run that crashed is needed most.

    Args:
        events: an events file, or a directory with one events file.

    Returns:
        The reports in the order of the file. Several runs may have written to one file.

    Raises:
        ReportError: the file has no event or cannot be read.
    """
    path = find_events_file(Path(events))
    try:
        events_file = read(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    damage = [f"line {line}: {problem}" for line, problem in events_file.problems]
    if not events_file.events:
        reason = "it is empty"
        if damage:
            reason = damage[0]
        raise ReportError(
            f"{path} has no event; {reason}. An events file has "
            'one JSON object per line, with "schema", "seq", "run" and "kind" (docs/events.md). '
            "For a training log type `healcore probe loss` or `healcore replay --report`"
        )
    runs = runs_of(events_file.by_process())
    notes = first_lines(damage, MAX_LINES, f"{path.name}: damaged: ")
    reports = []
    for history in runs:
        report = _report_on(path, history)
        title = report.title
        if len(runs) > 1:
            title += f" · {history.processes[0].id}"
        reports.append(report._replace(title=title, notes=(*notes, *report.notes)))
    return reports


def find_events_file(path: Path) -> Path:
    """Finds the events file that a path means.

    Args:
        path: an events file, or a directory.

    Returns:
        The path itself, or the only events file (`*events.jsonl`) in the directory.

    Raises:
        ReportError: the directory has no events file, or several.
    """
    if not path.is_dir():
        return path
    files = sorted(path.glob("*events.jsonl"))
    if len(files) == 1:
        return files[0]
    runs = sorted({str(file.parent) for file in path.glob("*/*events.jsonl")})
    if runs and not files:
        raise ReportError(
            f"{path} has no events file; pass a folder that has one: {first_of(runs, MAX_LINES)}"
        )
    found = ", ".join(file.name for file in files) or "none"
    raise ReportError(
        f"{path} must have one events file (*events.jsonl) and has {found}: name the file of "
        "logging=Logging(events=...)"
    )


def _report_on(path: Path, history: RunHistory) -> PageReport:
    """Builds the report on one run of the events file `path`."""
    written, obstacle = {}, ""
    for process in reversed(history.processes):
        written, obstacle = _read_postmortem(path, process.id)
        # A start of a completed run, as for an evaluation, has no postmortem of its own.
        if written or obstacle or process.end is None:
            break
    curves, curve_notes = _read_curves(metrics_path(path), history)
    start = history.start or EventRecord()
    state = history.state
    notes = _notes_on_fields(history)
    if obstacle:
        notes.append(obstacle)
    notes += curve_notes
    notes += _notes_of_run(history)
    diagnosis = written.get("diagnosis")
    if not isinstance(diagnosis, str):
        diagnosis = ""
    mode = Mode.HEAL
    if history.observes:
        mode = Mode.OBSERVE
    return PageReport(
        title=_name_of(path.absolute()),
        mode=mode,
        policy_name=start.policy or "unknown",
        policy_toml=start.policy_toml or "",
        fingerprint=start.fingerprint or "",
        curves=curves,
        incidents=tuple(history.incidents),
        counts=_counts(history, written),
        facts=_facts(history, state, written),
        state=state,
        notes=tuple(notes),
        attempts=tuple(history.attempts),
        alarms_outside=_alarms_outside(history),
        assessments=tuple(history.of("assessment")[-MAX_LINES:]),
        diagnosis=diagnosis,
        unrepaired=history.unrepaired,
    )


def _counts(history: RunHistory, written: dict[str, Any]) -> Counts:
    """The counts of a run. Only its postmortem has all clips, and skips without an event."""
    counts = history.counts()
    skips = written.get("observed_skips", written.get("skips"))
    if type(skips) is int:  # the file may be damaged
        counts = counts._replace(skips=max(skips, counts.skips))
    clips = written.get("observed_clips", written.get("clips"))
    if type(clips) is int:
        counts = counts._replace(clips=clips)
    return counts


def _name_of(path: Path) -> str:
    """The name of a run: its folder, and its events file if this has a name of its own."""
    name = stem(path)
    if name in ("events", "healcore", "run"):
        return path.parent.name
    return f"{path.parent.name}/{name}"


def _alarms_outside(history: RunHistory) -> dict[float, tuple[str, ...]]:
    """Step -> causes, of the alarms outside of incidents."""
    alarms: dict[float, tuple[str, ...]] = {}
    for event in history.of("alarm"):
        if not event.incident:
            alarms[event.step or 0] = tuple(event.cause or ())
    return alarms


def _notes_on_fields(history: RunHistory) -> list[str]:
    """Notes about events with fields of the wrong type."""
    malformed: list[str] = []
    for event, fields in history.malformed:
        malformed.append(f"event {event.seq} ({event.kind}): {', '.join(fields)}")
    return first_lines(malformed, MAX_LINES, "fields of the wrong type, ignored: ")


def _notes_of_run(history: RunHistory) -> list[str]:
    """Notes about lost events, and about problems that the run itself has reported."""
    notes: list[str] = []
    if history.lost:
        lost = counted(history.lost, "event is", "events are")
        notes.append(f"{lost} lost, because writing to the disk failed.")
    reported: list[str] = []
    for event in history.of("save_failed", "damaged", "problem"):
        if event.problem is not None:
            reported.append(f"step {event.step}: {event.problem}")
    return notes + first_lines(reported, MAX_LINES, "reported by the run: ")


def _read_curves(path: Path, history: RunHistory) -> tuple[Curves, list[str]]:
    """The curves of a run, and notes."""
    try:
        rows, damage = read_metrics(path, [process.id for process in history.processes])
    except FileNotFoundError:
        return _NO_CURVES, [_WITHOUT_METRICS]
    except OSError as error:
        return _NO_CURVES, [f"{path}: the metrics cannot be read: {error.strerror or error}"]
    notes = first_lines(damage, MAX_LINES, f"{path.name}: damaged: ")
    if not len(rows.step):
        return _NO_CURVES, [*notes, _WITHOUT_METRICS]
    return thinned(rows), notes


def _read_postmortem(events: Path, process: str) -> tuple[dict[str, Any], str]:
    """The postmortem next to an events file or {}, and why it is unreadable or an empty string."""
    path = postmortem.path_for(events, process)
    try:
        written = postmortem.read(path)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {type(error).__name__}"
    if not isinstance(written, dict):
        return {}, f"{path.name} is not a postmortem"
    return written, ""


def _facts(history: RunHistory, state: Ending, written: dict[str, Any]) -> dict[str, str]:
    """Lists the facts of a run for its page, without unknown values.

    The postmortem `written` has the step and the known-good checkpoint.
    """
    start = history.start or EventRecord()
    versions = start.environment or {}
    first: EventRecord | None = None
    step_at_end = written.get("step")
    for process in history.processes:
        if first is None:
            first = process.start
        if process.end:
            step_at_end = process.end.step
    if state is Ending.GONE and history.step is not None:
        step_at_end = f"{history.step} or later"
    faults: list[str] = []
    for event in history.of("fault")[-MAX_LINES:]:
        faults.append(f"step {event.step}: {sentence(event).removeprefix('fault: ')}")
    framework = (start.framework, versions.get(start.framework or ""))
    settings: list[str] = []
    for name, value in (start.settings or {}).items():
        if name != "policy":
            settings.append(f"{name} {value}")
    saved_every = None
    if start.save_every is not None:
        saved_every = counted(start.save_every, "step")
    lost = sum(event.steps_lost or 0 for event in history.of("rollback"))
    processes = start.world
    if processes == 1:
        processes = None
    facts = {
        "Ending": ending_text(state, history.unrepaired),
        "Run": ", ".join(process.id for process in history.processes),
        "Framework": " ".join(filter(None, framework)),
        "Mode": start.mode,
        "Started": _time_of(first),
        "Last event": _time_of(history.processes[-1].last),
        "Duration": _duration(history),
        "Faults": "; ".join(faults),
        "Step at the end": step_at_end,
        "Steps not repeated": lost or None,
        "Last known-good": written.get("last_good"),
        "Settings": ", ".join(settings),
        "Saved every": saved_every,
        "Checkpoints": start.store,
        "Host": start.host,
        "Processes": processes,
        "healcore": versions.get("healcore"),
        "Python": versions.get("python"),
    }
    known: dict[str, str] = {}
    for label, value in facts.items():
        if value not in (None, ""):
            known[label] = str(value)
    return known


def _duration(history: RunHistory) -> timedelta | None:
    """The sum of the durations of the processes, or None if none is known."""
    seconds = [each.seconds for each in history.processes if each.seconds is not None]
    if not seconds:
        return None
    # A damaged event may have any number of seconds.
    return timedelta(seconds=round(max(min(sum(seconds), 1e9), 0)))


def _time_of(event: EventRecord | None) -> str | None:
    """Formats the time of an event, or returns None if it is unknown."""
    if event is None or event.time is None:
        return None
    return f"{event.time[:10]} {event.time[11:19]} UTC"
