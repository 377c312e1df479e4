"""Reads reports on runs from their files, and defines the data of a report on a run or a replay."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.console import first_lines
from healcore.core.errors import HealcoreError
from healcore.events import read
from healcore.events.log import metrics_path
from healcore.events.models import EventRecord
from healcore.events.schema import sentence
from healcore.history import Counts, Curves, Incident, Mode, Run, RunState, runs_of
from healcore.history.curves import read_metrics, thinned
from healcore.history.run import RunAttempt, count_incidents
from healcore.runtime.story import postmortem
from healcore.runtime.story.diagnosis import STATES

MAX_LINES = 20
"""Limit of the lines of one kind that a report lists."""
_NO_CURVES = Curves(np.zeros(0), np.zeros(0))
_WITHOUT_METRICS = "There are no metrics: logging=Logging(metrics=...) writes run.metrics.jsonl."


class ReportError(HealcoreError, ValueError):
    """A file has no report. The message has the file, the rule and the remedy."""


class RunReport(NamedTuple):
    """The report on a run or a replay."""

    title: str
    mode: Mode
    policy_name: str
    policy_toml: str
    """The policy as TOML, or an empty string if unknown."""
    fingerprint: str
    curves: Curves
    incidents: tuple[Incident, ...]
    counts: Counts
    facts: dict[str, str]
    state: RunState | None = None
    """How the run ended, or None for a replay."""
    notes: tuple[str, ...] = ()
    """Sentences about damaged or missing data."""
    attempts: tuple[RunAttempt, ...] = ()
    alarms_outside: dict[float, tuple[str, ...]] = {}  # noqa: RUF012 -- never changed
    """Step -> causes, of the first alarms outside of incidents."""
    assessments: tuple[EventRecord, ...] = ()  # newest verdicts on the weights
    stopped_step: float | None = None
    """Step at which a replay would stop, or None."""
    diagnosis: str = ""
    """The diagnosis of the postmortem, or an empty string."""

    @property
    def is_hypothetical(self) -> bool:
        """Whether the report shows what the policy would have done, in mode OBSERVE or REPLAY."""
        return self.mode is not Mode.HEAL

    def ending(self) -> str:
        """How the run ended, the step of a replay's stop, or an empty string."""
        if self.state is not None:
            return STATES[self.state]
        return "" if self.stopped_step is None else f"would stop at step {self.stopped_step:.0f}"


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """The last two parts of each title's path, or the title if two titles share them."""
    titles = [report.title for report in reports]
    short = {title: "/".join(title.split("/")[-2:]) for title in titles}
    counts = Counter(short.values())
    return [short[title] if counts[short[title]] == 1 else title for title in titles]


def read_reports(events: str | os.PathLike[str]) -> list[RunReport]:
    """Reads a report on each run in an events file, or in the only events file of a directory.

    The curves are from `run.metrics.jsonl` next to `run.events.jsonl`.

    Raises:
        ReportError: the file has no event or cannot be read.
    """
    path = find_events_file(Path(events))
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
    notes = first_lines(damage, MAX_LINES, f"{path.name}: damaged: ")
    reports = []
    for run in runs:
        report = _report_on(path, run)
        title = f"{report.title} · {run.processes[0].id}" if len(runs) > 1 else report.title
        reports.append(report._replace(title=title, notes=(*notes, *report.notes)))
    return reports


def find_events_file(path: Path) -> Path:
    """A file itself, or the only events file in a directory. Raises ReportError."""
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
    curves, curve_notes = _read_curves(metrics_path(path), run)
    start = run.start or EventRecord()
    diagnosis = written.get("diagnosis")
    state = _state_of(run, written)
    malformed = [
        f"event {event.seq} ({event.kind}): {', '.join(fields)}" for event, fields in run.malformed
    ]
    reported = [e for kind in ("save_failed", "damaged", "problem") for e in run.newest[kind]]
    problems = [f"step {e.step}: {e.problem}" for e in reported if e.problem is not None]
    lost = [f"{run.lost} events are lost, because writing to the disk failed."] if run.lost else []
    return RunReport(
        title="/".join(path.absolute().parts[-2:]),
        mode=Mode.OBSERVE if run.observes else Mode.HEAL,
        policy_name=start.policy or "unknown",
        policy_toml=start.policy_toml or "",
        fingerprint=start.fingerprint or "",
        curves=curves,
        incidents=tuple(run.incidents),
        counts=run.counts()._replace(incidents=count_incidents(run.incidents).incidents),
        facts=_facts(run, state, written),
        state=state,
        notes=(
            *first_lines(malformed, MAX_LINES, "fields of the wrong type, ignored: "),
            *filter(None, (problem, *curve_notes)),
            *lost,
            *first_lines(problems, MAX_LINES, "reported by the run: "),
        ),
        attempts=tuple(run.attempts),
        alarms_outside=run.alarms_outside,
        assessments=tuple(run.newest["assessment"]),
        diagnosis=diagnosis if isinstance(diagnosis, str) else run.processes[-1].diagnosis,
    )


def _read_curves(path: Path, run: Run) -> tuple[Curves, list[str]]:
    """The curves of a run, and notes."""
    try:
        rows, damage = read_metrics(path, [process.id for process in run.processes])
    except FileNotFoundError:
        return _NO_CURVES, [_WITHOUT_METRICS]
    except OSError as error:
        return _NO_CURVES, [f"{path}: the metrics cannot be read: {error.strerror or error}"]
    notes = first_lines(damage, MAX_LINES, f"{path.name}: damaged: ")
    if not len(rows.step):
        return _NO_CURVES, [*notes, _WITHOUT_METRICS]
    return thinned(rows), notes


def _read_postmortem(events: Path, run: str) -> tuple[dict[str, Any], str]:
    """The postmortem next to an events file or {}, and a problem or an empty string."""
    path = postmortem.path_for(events, run)
    try:
        written = postmortem.read(path)
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{path.name} cannot be read: {type(error).__name__}"
    return (written, "") if isinstance(written, dict) else ({}, f"{path.name} is not a postmortem")


def _state_of(run: Run, written: dict[str, Any]) -> RunState:
    """The state by the events or, after a kill, by the postmortem of the next process."""
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
    faults = [f"step {f.step}: {sentence(f).removeprefix('fault: ')}" for f in run.newest["fault"]]
    facts = {
        "Ending": STATES[state],
        "Run": ", ".join(process.id for process in run.processes),
        "Framework": " ".join(part for part in framework if part),
        "Mode": start.mode,
        "Started": _time_of(first),
        "Last event": _time_of(run.processes[-1].last),
        "Duration": f"{timedelta(seconds=round(max(min(sum(seconds), 1e9), 0)))}"
        if seconds
        else None,
        "Faults": "; ".join(faults),
        "Step at the end": ends[-1].step if ends else written.get("step"),
        "Steps not repeated": sum(each.steps_lost or 0 for each in run.rollbacks) or None,
        "Last known-good": written.get("last_good") if run.last_good is None else run.last_good,
        "Settings": ", ".join(f"{n} {v}" for n, v in run.settings.items() if n != "policy"),
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
