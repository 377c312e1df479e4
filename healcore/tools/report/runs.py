"""Makes reports from the files of runs."""

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

_FAULTS = 20
"""Most faults that are listed."""


class ReportError(HealcoreError, ValueError):
    """A file without a report. The message has the file, the rule and the remedy."""


def read_reports(
    events: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
) -> list[RunReport]:
    """A report of each run in an events file, or in a directory with one.

    `metrics` may be any trace that `healcore replay` reads. By default it is `run.metrics.jsonl`
    next to `run.events.jsonl`, if that file exists. `policy` is the policy of the run if the events
    do not contain it. Raises ReportError if the file has no event or cannot be read.
    """
    path = find_events(Path(events))
    history = _read(path)
    found = runs_of(history.runs())
    source = path_next_to(path) if metrics is None else Path(metrics)
    if metrics is None and not source.is_file():
        source = None
    damage = [f"line {each.line}: {each.problem}" for each in history.problems]
    notes = first_lines(f"{path.name}: damaged", damage)
    reports = []
    for run in found:
        report = _report(path, run, source, policy)
        title = f"{report.title} · {run.processes[0].id}" if len(found) > 1 else report.title
        reports.append(report._replace(title=title, notes=(*notes, *report.notes)))
    return reports


def find_events(path: Path) -> Path:
    """The events file, or the only events file in a directory. Raises ReportError."""
    if not path.is_dir():
        return path
    found = sorted(path.glob("*events.jsonl"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ReportError(
            f"{path}: no events file (*events.jsonl) in this directory; "
            "name the file that the argument events= writes (of Healer, heal or a callback)"
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
    first = first_nonblank_line(path)
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
        f"event {event.seq} ({event.kind}): {', '.join(fields)}" for event, fields in run.malformed
    ]
    found, problem = _postmortem_of(path, run.processes[-1].id)
    diagnosis = (found or {}).get("diagnosis")
    drawn = read_curves(run, metrics)
    counted = drawn.counts or Counts(alarms=0)
    ran = policy_of(run.start, policy)
    return RunReport(
        title="/".join(path.absolute().parts[-2:]),
        mode=Mode.OBSERVE if run.observes else Mode.HEAL,
        policy_name=ran.name,
        policy_toml=ran.toml,
        fingerprint=ran.fingerprint,
        curves=drawn.curves,
        incidents=drawn.incidents,
        counts=count_incidents(
            drawn.incidents,
            alarms=max(run.alarms, counted.alarms or 0),
            skips=max(run.skips, counted.skips),
            undone_skips=max(run.undone_skips, counted.undone_skips),
            clips=counted.clips,
        ),
        facts=_facts_of(run, found),
        state=_state_of(run, found),
        notes=(
            *first_lines("fields of the wrong type, ignored", malformed),
            *filter(None, (problem, *drawn.notes, ran.note)),
            *_missing(run, counted=drawn.counts is not None),
        ),
        attempts=drawn.attempts,
        marks=tuple(run.marks),
        diagnosis=diagnosis if isinstance(diagnosis, str) else run.processes[-1].diagnosis,
        unreadable=drawn.unreadable,
    )


def _missing(run: Run, *, counted: bool) -> list[str]:
    notes = []
    if run.lost:
        notes.append(f"{run.lost} events could not be written: the disk failed.")
    if run.unreported_alarms:
        where = "the metrics have them" if counted else "they are not counted here"
        notes.append(f"{run.unreported_alarms} alarms have no own event: {where}.")
    problems = [f"step {event.step}: {event.problem}" for event in run.problems]
    return notes + first_lines("reported by the run", problems)


# -- facts -----------------------------------------------------------------------------------------


class RunPolicy(NamedTuple):
    """The policy of a run."""

    name: str
    toml: str
    fingerprint: str
    note: str = ""
    """Why the text is missing or may belong to another policy, or an empty string."""


def policy_of(start: EventRecord | None, given: Policy | None) -> RunPolicy:
    """The given policy, else the policy in `start`, the start event of the last process."""
    start = start or EventRecord()
    name, ran, written = start.policy or "", start.fingerprint or "", start.policy_toml or ""
    if given is None:
        text = policy_text(name, ran, written)
        if text:
            return RunPolicy(name, text, ran)
        note = "The text of the policy is not in the events: pass its file with --policy FILE."
        return RunPolicy(name or "unknown", "", ran, note)
    fingerprint = policies.fingerprint(given)
    note = ""
    if ran and fingerprint != ran:
        note = (
            f"The policy given with --policy ({given.name}, {fingerprint}) is not the run's policy "
            f"({name}, {ran}): it was edited since, or is another policy."
        )
    return RunPolicy(name or given.name, policies.dumps(given), ran or fingerprint, note)


def policy_text(name: str, fingerprint: str, written: str) -> str:
    """A preset's text with its comments if `written` has the same values, else `written`.

    The fingerprint does not cover the keys of the host.
    """
    if name not in (*policies.preset_names(), *policies.recipe_names()):
        return written
    preset = policies.load(name)
    commented = policies.preset_text(name)
    same = written in ("", commented, policies.dumps(preset))
    return commented if same and policies.fingerprint(preset) == fingerprint else written


def _state_of(run: Run, found: dict[str, Any] | None) -> RunState:
    """The state by the events, else by the postmortem, which the next process writes."""
    if run.end is not None or found is None:
        return run.state
    ending = found.get("ending")
    return RunState(ending) if ending in set(RunState) else RunState.ENDED


def _facts_of(run: Run, found: dict[str, Any] | None) -> dict[str, str]:
    start, recorded = run.start or EventRecord(), found or {}
    first = next((each.start for each in run.processes if each.start), None)
    ends = [each.end for each in run.processes if each.end]
    versions = start.environment or {}
    framework = (start.framework, versions.get(start.framework or ""))
    known = {
        "Ending": STATES[_state_of(run, found)],
        "Run": ", ".join(each.id for each in run.processes),
        "Framework": " ".join(part for part in framework if part),
        "Mode": start.mode,
        "Started": _time_of(first),
        "Last event": _time_of(run.processes[-1].last if run.processes else None),
        "Duration": _duration(run),
        "Faults": _faults(run),
        "Step at the end": ends[-1].step if ends else recorded.get("step"),
        "Last known-good": recorded.get("last_good") if run.last_good is None else run.last_good,
        "Saved every": None if start.save_every is None else f"{start.save_every} steps",
        "Read after": None if start.lag is None else f"{start.lag} steps",
        "Checkpoints": start.store,
        "Host": start.host,
        "Processes": None if start.world == 1 else start.world,
        "healcore": versions.get("healcore"),
        "Python": versions.get("python"),
    }
    return {label: str(value) for label, value in known.items() if value not in (None, "")}


def _faults(run: Run) -> str:
    texts = (sentence(each).removeprefix("fault: ") for each in run.faults)
    named = [f"step {each.step}: {text}" for each, text in zip(run.faults, texts, strict=True)]
    shown = "; ".join(named[:_FAULTS])
    more = len(run.faults) - _FAULTS
    return f"{shown}; and {more} more" if more > 0 else shown


def _postmortem_of(path: Path, run: str) -> tuple[dict[str, Any] | None, str]:
    """The postmortem next to an events file or None, and a problem or an empty string."""
    place = postmortem.path_for(path, run)
    try:
        found = postmortem.read(place)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{place.name} cannot be read: {type(error).__name__}"
    return (found, "") if isinstance(found, dict) else (None, f"{place.name} is not a postmortem")


def _time_of(event: EventRecord | None) -> str | None:
    if event is None or event.time is None:
        return None
    return f"{event.time[:10]} {event.time[11:19]} UTC"


def _duration(run: Run) -> str | None:
    """Total duration of all processes, each by its own monotonic clock."""

    def text(seconds: float) -> str:
        in_range = 60 <= seconds < 1e9
        return str(timedelta(seconds=round(seconds))) if in_range else f"{seconds:.1f} s"

    each = [one.seconds for one in run.processes if one.seconds is not None]
    if len(each) > 1:
        return f"{text(sum(each))} in {len(each)} processes together; of the last {text(each[-1])}"
    return text(each[0]) if each else None
