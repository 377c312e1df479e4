"""Writes and reads the postmortem, a JSON file about how a run ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from healcore import console, regular_file
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.events import Log, json_lines, log
from healcore.events.log import Event
from healcore.events.metrics import stem
from healcore.events.models import Ending, record
from healcore.events.process import Process, current_process, environment
from healcore.history import Incident, Run
from healcore.history.process import KnownGood
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.postmortem.rank_notes import RankNote, RankNotes, traces
from healcore.runtime.recovery.rollback import Rollback
from healcore.runtime.store import files
from healcore.runtime.store.commit import sweep

SCHEMA = 2


class RankStacks(NamedTuple):
    """The Python stacks of a process that hung."""

    ranks: tuple[int, ...]
    """Ranks whose training threads stood at the same place; the stacks are of the first."""
    stacks: str


class Postmortem(NamedTuple):
    """How a run ended; docs/events.md describes the fields."""

    run: str
    ending: str
    """One of `Ending`."""
    step: int
    """Optimizer steps done; of a killed run that of its last event."""
    diagnosis: str
    cause: tuple[str, ...] = ()
    incidents: int = 0
    clips: int = 0
    """Clipped steps of the whole run."""
    skips: int = 0
    """Skipped steps of the whole run, including steps that a rollback has undone."""
    metrics: dict[str, float] = {}  # noqa: RUF012 -- never changed
    """The numbers of the last step that was read, and all counts; empty for a killed run."""
    rollbacks: tuple[Rollback, ...] = ()
    lr_scale: float = 1.0
    last_good: int | None = None
    last_good_path: str | None = None
    exception: str | None = None
    """What was raised, with its traceback."""
    ended: str = ""
    """Wall time, ISO 8601, UTC; of a killed run that of its last event."""
    seconds: float | None = None
    lost_events: int = 0
    process: Process | None = None
    environment: dict[str, str] = {}  # noqa: RUF012 -- never changed
    certain: bool = True
    """False: it ran on another host, and is assumed to be gone as a new process began."""
    stacks: tuple[RankStacks, ...] = ()
    """The stacks of a run that hung, of all ranks that have sent theirs."""


def of(
    end: RunEnd, events: Log, *, seconds: float | None = None, trace: str | None = None
) -> Postmortem:
    """The postmortem of this process; `trace` is the exception with its traceback, if any."""
    return _postmortem(
        end,
        run=events.run,
        exception=trace or end.exception,
        ended=log.now(),
        seconds=seconds,
        lost_events=events.lost,
        process=current_process(),
        environment=environment(),
    )


def _postmortem(end: RunEnd, **more: Any) -> Postmortem:
    return Postmortem(
        ending=end.ending,
        step=end.step,
        diagnosis=explain(end),
        cause=tuple(flag.name for flag in Cause if flag.name and flag in end.cause),
        incidents=end.incidents,
        clips=end.clips,
        skips=end.skips,
        metrics=dict(end.metrics),
        rollbacks=end.rollbacks,
        lr_scale=end.lr_scale,
        last_good=end.last_good,
        last_good_path=end.path,
        **more,
    )


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """The file of a run's postmortem, in the directory of its events.

    `run.events.jsonl` has `run.postmortem.<run id>.json`, one for each run: the success of the next
    one must not overwrite why this one failed.
    """
    path = Path(events)
    safe = re.sub(r"[^\w.-]", "_", run)
    return path.with_name(f"{stem(path)}.postmortem.{safe}.json")


def write(path: str | os.PathLike[str], postmortem: Postmortem) -> str | None:
    """Writes the file whole or not at all. Returns errors and never raises: the run is ending."""
    path = Path(path)
    try:
        text = json.dumps({"schema": SCHEMA, **json_lines.to_json(postmortem)}, indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    sweep(path.parent)
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a postmortem file; raises OSError, or ValueError if it is not JSON."""
    return json.loads(regular_file.read(Path(path)))


def of_killed(events: str | os.PathLike[str]) -> Postmortem | None:
    """Writes the postmortem of the last run in an events file if that was killed.

    Called by the next process before it writes its own `start`. Never raises. Returns None if there
    was no run, or it has written its end or is still running.
    """
    try:
        found = _killed(Path(events))
    except Exception as error:
        console.warning(f"how the last run in {events} ended cannot be found out: {error!r}")
        return None
    if found is not None:
        problem = write(path_for(events, found.run), found)
        if problem is not None:
            console.warning(problem)
    return found


def _killed(path: Path) -> Postmortem | None:
    if not path.is_file():
        return None
    events = log.read(path).events
    run = last_process(events)
    if run is None or run.end is not None:
        return None
    last = run.processes[-1]
    process = last.process()
    if process is None:
        raise ValueError("its start has no host and pid")
    gone = process.gone()
    if gone is False:
        return None
    why = "" if gone else f"it ran on {process.host}, which cannot be seen from here"
    notes = RankNotes(path, last.id)
    end, raised = end_of_killed(run, events, why=why), notes.found()
    if raised and not raised[0].follows:
        end = end._replace(exception=f"rank {raised[0].rank}: {raised[0].why}")
    return _postmortem(
        end,
        run=last.id,
        exception=traces(raised) or None,
        ended=last.last.time or "" if last.last else "",
        certain=bool(gone),
        stacks=tuple(stacks_of(notes.found(hangs=True))),
        **_by_events(run),
    )


def stacks_of(notes: Iterable[RankNote]) -> list[RankStacks]:
    """The stacks of ranks that hang; once for ranks whose training threads stand at one place."""
    groups: dict[str, list[RankNote]] = {}
    for note in sorted(notes, key=lambda note: note.rank):
        groups.setdefault(note.trace.partition("\nThread ")[0], []).append(note)
    return [
        RankStacks(tuple(note.rank for note in same), same[0].trace) for same in groups.values()
    ]


def end_of_hung(events: str | os.PathLike[str], *, step: int, why: str) -> RunEnd:
    """The facts about the run that is the last one in an events file, and hangs."""
    known = log.read(events).events
    end = end_of_killed(last_process(known) or Run(), known)
    return end._replace(ending=Ending.STOPPED, step=step, why=why, fault=Cause.HANG)


def write_hung(end: RunEnd, events: Log, stacks: Sequence[RankStacks]) -> str | None:
    """Writes the postmortem of a run that hangs, from its events; returns errors."""
    assert events.path is not None
    run = last_process(log.read(events.path).events) or Run()
    found = _postmortem(
        end, run=events.run, ended=log.now(), stacks=tuple(stacks), **_by_events(run)
    )
    found = found._replace(cause=(*found.cause, Cause.HANG.name))
    return write(path_for(events.path, events.run), found)


def _by_events(run: Run) -> dict[str, Any]:
    """What the events say about the last process of a run that does not run here."""
    if not run.processes:
        return {"lost_events": run.lost}
    last = run.processes[-1]
    return {
        "lost_events": run.lost,
        "seconds": None if last.seconds is None else round(last.seconds, 6),
        "process": last.process(),
        "environment": (last.start and last.start.environment) or {},
    }


def last_process(events: Sequence[Event]) -> Run | None:
    """The last process of a file, from its `start` on; None: there is no `start`."""
    start = next((event for event in reversed(events) if event["kind"] == "start"), None)
    if start is None:
        return None
    own = [e for e in events if e["run"] == start["run"] and e["seq"] >= start["seq"]]
    run = Run()
    for event in sorted(own, key=lambda event: event["seq"]):
        run.add(event)
    return run


def end_of_killed(run: Run, events: Iterable[Event], *, why: str = "") -> RunEnd:
    """The facts about a killed process; `events` may have an earlier one's last known-good."""
    good = KnownGood()
    for event in events:
        good.add(record(event)[0])
    last = run.last_incident or Incident(0, 0, 0, 0)
    readings = last.readings
    return RunEnd(
        ending=Ending.KILLED,
        step=run.last_step or 0,
        why=why,
        cause=_cause(last.cause),
        onset=int(last.onset_step) if last.number else None,
        open=None,
        incidents=run.incident_count,
        readings=None if readings is None else Readings(**readings.model_dump()),
        evidence=last.evidence,
        batches=last.batches,
        undone_incidents=run.undone_incidents,
        skips=run.skips,
        undone_skips=run.undone_skips,
        rollbacks=tuple(map(Rollback.of, run.rollbacks)),
        lr_scale=1.0 if run.lr_scale is None else run.lr_scale,
        verdict=run.rerun or "",
        damaged=tuple(run.damaged),
        observes=run.observes,
        last_good=good.newest,
    )


def _cause(flags: Iterable[str]) -> Cause:
    cause = Cause(0)
    for name in flags:
        cause |= Cause.__members__.get(name, Cause.UNKNOWN)  # of a newer healcore
    return cause
