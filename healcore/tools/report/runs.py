"""Reads reports from the files of runs."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from healcore import policy as policies
from healcore.core.errors import HealcoreError
from healcore.events import History, read
from healcore.events.json_lines import first_nonblank_line
from healcore.events.metrics import path_next_to, stem
from healcore.events.models import EventRecord
from healcore.history import Mode, Run, runs_of
from healcore.history.incident import Counts, count_incidents
from healcore.history.metrics import parse_metrics
from healcore.history.process import RunState
from healcore.policy import Policy
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.sentences import STATES, sentence
from healcore.tools.report.curves import first_lines, read_curves
from healcore.tools.report.run_report import RunReport

_MAX_FAULTS = 20
_MAX_FOLDERS = 8


class ReportError(HealcoreError, ValueError):
    """A file has no report. The message has the file, the rule and the remedy."""


def read_reports(
    events: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
) -> list[RunReport]:
    """Reads a report on each run in an events file.

    Args:
        events: the events file, or a directory with one events file.
        metrics: any trace that `healcore replay` reads. Default: `run.metrics.jsonl` next to
            `run.events.jsonl`, if this file exists.
        policy: the policy of the run, needed if the events do not contain it.

    Raises:
        ReportError: the file has no event or cannot be read.
    """
    path = find_events(Path(events))
    history = _read(path)
    runs = runs_of(history.runs())
    source = path_next_to(path) if metrics is None else Path(metrics)
    if metrics is None and not source.is_file():
        source = None
    damage = [f"line {line}: {problem}" for line, problem in history.problems]
    notes = first_lines(f"{path.name}: damaged", damage)
    reports = []
    for run in runs:
        report = _report_on(path, run, source, policy)
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
    if not files:
        folders = list(dict.fromkeys(str(e.parent) for e in sorted(path.glob("*/*events.jsonl"))))
        more = ", ..." if len(folders) > _MAX_FOLDERS else ""
        remedy = f"one of its subfolders with events: {', '.join(folders[:_MAX_FOLDERS])}{more}"
        if not folders:
            remedy = "the file of logging=Logging(events=...) of the Healer or callback"
        raise ReportError(
            f"{path}: no events file (*events.jsonl) in this directory; name {remedy}"
        )
    names = ", ".join(file.name for file in files)
    raise ReportError(f"{path}: more than one events file ({names}): name one of them")


def _read(path: Path) -> History:
    try:
        history = read(path)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error
    if history.events:
        return history
    first = first_nonblank_line(path)
    if first is None:
        raise ReportError(f"{path} is empty: a run writes its first event at the start")
    if not isinstance(parse_metrics(first), str):
        raise ReportError(
            f"{path} is a metrics file, and a report needs the events file: "
            f"run healcore report {stem(path)}.events.jsonl --metrics {path.name}"
        )
    line, problem = history.problems[0]
    raise ReportError(
        f"{path} has no event; line {line}: {problem}. An events file has one "
        'JSON object per line, with "schema", "seq", "run" and "kind" (docs/events.md)'
    )


def _report_on(path: Path, run: Run, metrics: Path | None, policy: Policy | None) -> RunReport:
    malformed = [
        f"event {event.seq} ({event.kind}): {', '.join(fields)}" for event, fields in run.malformed
    ]
    written, problem = read_postmortem(path, run.processes[-1].id)
    run.add_postmortem(written or {})
    diagnosis = (written or {}).get("diagnosis")
    curves = read_curves(run, metrics)
    in_metrics = curves.counts or Counts(alarms=0)
    run_policy = select_policy(run.start, policy)
    state = _state_of(run, written)
    return RunReport(
        title="/".join(path.absolute().parts[-2:]),
        mode=Mode.OBSERVE if run.observes else Mode.HEAL,
        policy_name=run_policy.name,
        policy_toml=run_policy.toml,
        fingerprint=run_policy.fingerprint,
        curves=curves.curves,
        incidents=curves.incidents,
        counts=count_incidents(
            curves.incidents,
            alarms=max(run.alarms, in_metrics.alarms or 0),
            skips=max(run.skips, in_metrics.skips),
            undone_skips=max(run.undone_skips, in_metrics.undone_skips),
            clips=in_metrics.clips,
        ),
        facts=_facts(run, state, written or {}),
        state=state,
        notes=(
            *first_lines("fields of the wrong type, ignored", malformed),
            *filter(None, (problem, *curves.notes, run_policy.note)),
            *_problems(run, counted=curves.counts is not None),
        ),
        attempts=curves.attempts,
        marks=tuple(run.marks),
        diagnosis=diagnosis if isinstance(diagnosis, str) else run.processes[-1].diagnosis,
        unreadable=curves.unreadable,
    )


def _problems(run: Run, *, counted: bool) -> list[str]:
    """Returns notes about lost events, alarms without an event, and problems in the events."""
    notes = []
    if run.lost:
        notes.append(f"{run.lost} events are lost, because writing to the disk failed.")
    if run.unreported_alarms:
        where = "the metrics count them" if counted else "the counts exclude them"
        notes.append(f"{run.unreported_alarms} alarms have no event of their own: {where}.")
    problems = [f"step {event.step}: {event.problem}" for event in run.problems]
    return notes + first_lines("reported by the run", problems)


# -- facts -----------------------------------------------------------------------------------------


class RunPolicy(NamedTuple):
    """The policy of a run."""

    name: str
    toml: str
    fingerprint: str
    note: str = ""
    """Why the TOML is missing or may belong to another policy, or an empty string."""


def select_policy(start: EventRecord | None, policy: Policy | None) -> RunPolicy:
    """Returns `policy` if it is not None, or else the policy in the event `start`."""
    start = start or EventRecord()
    name, in_run, toml = start.policy or "", start.fingerprint or "", start.policy_toml or ""
    if policy is None:
        text = policy_text(name, in_run, toml)
        if text:
            return RunPolicy(name, text, in_run)
        note = "The events do not contain the policy: pass its file with --policy FILE."
        return RunPolicy(name or "unknown", "", in_run, note)
    fingerprint = policies.fingerprint(policy)
    note = ""
    if in_run and fingerprint != in_run:
        note = (
            f"The policy of --policy ({policy.name}, {fingerprint}) is not the run's policy "
            f"({name}, {in_run}): it was edited after the run, or is another policy."
        )
    return RunPolicy(name or policy.name, policies.dumps(policy), in_run or fingerprint, note)


def policy_text(name: str, fingerprint: str, toml: str) -> str:
    """Returns the preset's text with its comments if `toml` has equal values, else `toml`."""
    if name not in (*policies.preset_names(), *policies.recipe_names()):
        return toml
    preset = policies.load(name)
    commented = policies.preset_text(name)
    # The fingerprint alone does not suffice, because it excludes the host's keys.
    same = toml in ("", commented, policies.dumps(preset))
    return commented if same and policies.fingerprint(preset) == fingerprint else toml


def _state_of(run: Run, written: dict[str, Any] | None) -> RunState:
    """Returns the state by the events or, after a kill, by the postmortem of the next process."""
    if run.end is not None or written is None:
        return run.state
    ending = written.get("ending")
    return RunState(ending) if ending in set(RunState) else RunState.ENDED


def _facts(run: Run, state: RunState, written: dict[str, Any]) -> dict[str, str]:
    start = run.start or EventRecord()
    first = next((process.start for process in run.processes if process.start), None)
    ends = [process.end for process in run.processes if process.end]
    versions = start.environment or {}
    framework = (start.framework, versions.get(start.framework or ""))
    facts = {
        "Ending": STATES[state],
        "Run": ", ".join(process.id for process in run.processes),
        "Framework": " ".join(part for part in framework if part),
        "Mode": start.mode,
        "Started": _time_of(first),
        "Last event": _time_of(run.processes[-1].last if run.processes else None),
        "Duration": _duration(run),
        "Faults": _faults(run),
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


def _faults(run: Run) -> str:
    faults = run.faults[:_MAX_FAULTS]
    shown = "; ".join(f"step {f.step}: {sentence(f).removeprefix('fault: ')}" for f in faults)
    more = len(run.faults) - _MAX_FAULTS
    return f"{shown}; and {more} more" if more > 0 else shown


def read_postmortem(events: Path, run: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the postmortem next to an events file or None, and a problem or an empty string."""
    path = postmortem.path_for(events, run)
    try:
        written = postmortem.read(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{path.name} cannot be read: {type(error).__name__}"
    is_valid = isinstance(written, dict)
    return (written, "") if is_valid else (None, f"{path.name} is not a postmortem")


def _time_of(event: EventRecord | None) -> str | None:
    if event is None or event.time is None:
        return None
    return f"{event.time[:10]} {event.time[11:19]} UTC"


def _duration(run: Run) -> str | None:
    """Returns the total duration of all processes, each by its own monotonic clock."""

    def text(seconds: float) -> str:
        in_range = 60 <= seconds < 1e9
        return str(timedelta(seconds=round(seconds))) if in_range else f"{seconds:.1f} s"

    seconds = [process.seconds for process in run.processes if process.seconds is not None]
    if len(seconds) > 1:
        last = text(seconds[-1])
        return f"{text(sum(seconds))} in {len(seconds)} processes; the last process ran {last}"
    return text(seconds[0]) if seconds else None
