"""From the files of a run to its story."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.policy import Policy
from healcore.runtime.events import read
from healcore.runtime.events.metrics import path_beside, stem
from healcore.runtime.events.reading import Event, History, first_line
from healcore.tools.report import facts, metric_lines
from healcore.tools.report.casebook import open_casebook
from healcore.tools.report.lineages import Lineage, lineages
from healcore.tools.report.sound import sound
from healcore.tools.report.sources import MetricsError, curves_of, listed
from healcore.tools.report.story import Story


class ReportError(HealcoreError, ValueError):
    """A file that no report can be made of: the file, the rule, what to write instead."""


class Told(NamedTuple):
    """What the files of a run have told."""

    stories: list[Story]
    """One for each training run in the file, however many processes it took."""
    problems: list[str]
    """Damage in the files, and what is missing; each is in the notes of its story too."""
    unreadable: str
    """Why the metrics could not be read at all; empty: they were, or there are none."""


def tell(
    events: str | os.PathLike[str],
    *,
    metrics: str | os.PathLike[str] | None = None,
    policy: Policy | None = None,
) -> Told:
    """The stories in an events file.

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
    found = lineages(history.runs())
    source = path_beside(path) if metrics is None else Path(metrics)
    if metrics is None and not source.is_file():
        source = None
    damage = [f"line {each.line}: {each.problem}" for each in history.problems]
    notes = listed(f"{path.name}: damaged", damage)
    unreadable = ""
    stories = []
    for lineage in found:
        try:
            story = _story(path, lineage, source, policy)
        except MetricsError as error:
            unreadable, source = str(error), None
            notes.append(unreadable)
            story = _story(path, lineage, source, policy)
        title = f"{story.title} · {lineage.runs[0]}" if len(found) > 1 else story.title
        stories.append(story._replace(title=title, notes=(*notes, *story.notes)))
    problems = list(dict.fromkeys(note for story in stories for note in story.notes))
    return Told(stories, problems, unreadable)


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
    if not isinstance(metric_lines.parse(first), str):
        raise ReportError(
            f"{path} is a metrics file, and a report begins with the events: "
            f"write healcore report {stem(path)}.events.jsonl --metrics {path.name}"
        )
    where = history.problems[0]
    raise ReportError(
        f"{path} has no event in it; line {where.line}: {where.problem}. An events file has one "
        'JSON object per line, with "schema", "seq", "run" and "kind" (docs/events.md)'
    )


def _story(path: Path, lineage: Lineage, metrics: Path | None, policy: Policy | None) -> Story:
    notes: list[str] = []
    events = []
    for event in lineage.events:
        kept, wrong = sound(event)
        events.append(kept)
        if wrong:
            notes.append(
                f"event {event['seq']} ({event['kind']}): {', '.join(wrong)} not as agreed"
            )
    notes = listed("fields left out, not in their shape", notes)
    book = open_casebook(events)
    died, trouble = facts.postmortem_of(path, lineage.runs[-1])
    notes += [trouble] if trouble else []
    drawn = curves_of(book, metrics)
    ran = facts.policy_of(events, policy)
    notes += [*drawn.notes, *([ran.note] if ran.note else [])]
    notes += _gaps(events, counted=drawn.tally is not None)
    alarms = [event for _, event in book.alarms]
    skips = sum(event.get("skip", False) for event in alarms)
    return Story(
        title="/".join(path.absolute().parts[-2:]),  # run.events.jsonl alone names no run
        kind="run",
        policy_name=ran.name,
        policy_toml=ran.toml,
        fingerprint=ran.fingerprint,
        series=drawn.series,
        incidents=drawn.incidents,
        facts=facts.facts_of(events, died),
        notes=tuple(notes),
        parts=drawn.parts,
        marks=book.marks,
        diagnosis=_diagnosis(events, died),
        alarms=max(len(alarms), drawn.tally.alarms if drawn.tally else 0),
        skips=max(skips, drawn.tally.skips if drawn.tally else 0),
        clips=drawn.tally.clips if drawn.tally else None,
        repeats=book.repeats,
    )


def _diagnosis(events: Sequence[Event], died: dict[str, Any] | None) -> str:
    if died is not None and isinstance(died.get("diagnosis"), str):
        return died["diagnosis"]
    last = events[-1]["run"]
    said = (e["diagnosis"] for e in reversed(events) if e["run"] == last and "diagnosis" in e)
    return next(said, "")


def _gaps(events: Sequence[Event], *, counted: bool) -> list[str]:
    """What the run itself could not write, or not in full."""
    told = []
    lost = sum(event.get("lost", 0) for event in events)
    if lost:
        told.append(f"{lost} events could not be written by the run (a disk that failed).")
    untold = sum(event.get("untold_alarms", 0) for event in events)
    if untold:
        where = "the metrics have them" if counted else "they count in no column here"
        told.append(f"{untold} alarms got no event of their own: {where}.")
    problems = [
        f"step {event['step']}: {event['problem']}"
        for event in events
        if event["kind"] in ("problem", "save_failed", "damaged") and "problem" in event
    ]
    return told + listed("told by the run", problems)
