"""Writes and reads the postmortem, a JSON file about how a run ended."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from healcore import console, regular_file
from healcore.core.step_record import Readings
from healcore.core.verdict import Cause
from healcore.events import Log, json_lines, log
from healcore.events.metrics import stem
from healcore.events.models import Ending
from healcore.events.process import Process, current_process, environment
from healcore.history import Incident, Run, runs_of
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.postmortem.rank_notes import RankNote, RankNotes, traces
from healcore.runtime.store import files

SCHEMA = 2


class RankStacks(NamedTuple):
    """The Python stacks of a process that hung."""

    ranks: tuple[int, ...]
    """Ranks whose training threads were at the same place. `stacks` is that of the first rank."""
    stacks: str


class Postmortem(NamedTuple):
    """How a run ended; docs/events.md describes the fields of the file."""

    run: str
    end: RunEnd
    exception: str | None = None
    """The exception with its traceback, or None."""
    ended: str = ""
    """Time of the end, ISO 8601, UTC. For a killed run, the time of its last event."""
    seconds: float | None = None
    lost_events: int = 0
    process: Process | None = None
    environment: Mapping[str, str] = MappingProxyType({})
    certain: bool = True
    """False for a run on another host, which is assumed to have ended because a new run began."""
    stacks: tuple[RankStacks, ...] = ()
    """The stacks of a run that hung, for all ranks that have reported them."""

    def to_dict(self) -> dict[str, Any]:
        """The content of the file as JSON values."""
        fields = self._asdict()
        end = fields.pop("end")
        fields |= {name: getattr(end, name) for name in _FROM_END}
        fields["diagnosis"] = explain(end)
        fields["cause"] = end.cause | end.fault & Cause.HANG
        fields["rollbacks"] = [
            {name: getattr(rollback, name) for name in _FROM_ROLLBACK} for rollback in end.rollbacks
        ]
        return json_lines.to_json({"schema": SCHEMA, **fields})


_FROM_END = ("ending", "step", "incidents", "clips", "skips", "undone_skips", "metrics")
_FROM_END += ("lr_scale", "last_good", "last_good_path")
_FROM_ROLLBACK = ("step", "onset", "target", "lr", "lr_limit", "lr_scale", "skipped")


def of(
    end: RunEnd, events: Log, *, seconds: float | None = None, trace: str | None = None
) -> Postmortem:
    """The postmortem of this process; `trace` is the exception with its traceback, or None."""
    return Postmortem(
        events.run,
        end,
        exception=trace or end.exception,
        ended=log.now(),
        seconds=seconds,
        lost_events=events.lost,
        process=current_process(),
        environment=environment(),
    )


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """The postmortem file of a run: `run.postmortem.<run id>.json` next to `run.events.jsonl`."""
    path = Path(events)
    safe = re.sub(r"[^\w.-]", "_", run)
    return path.with_name(f"{stem(path)}.postmortem.{safe}.json")


def write(path: str | os.PathLike[str], postmortem: Postmortem) -> str | None:
    """Writes the file atomically. Returns the error, if any, and never raises: the run ends."""
    path = Path(path)
    try:
        text = json.dumps(postmortem.to_dict(), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a postmortem file. Raises OSError, or ValueError if it is not JSON."""
    return json.loads(regular_file.read(Path(path)))


def of_killed(events: str | os.PathLike[str]) -> Postmortem | None:
    """Writes the postmortem of the last run in an events file if the run was killed.

    The next process calls it before it writes its own `start`. Never raises. Returns None if the
    file has no run, or if the run has written its end or is still running.
    """
    try:
        postmortem = _killed(Path(events))
    except Exception as error:
        console.warning(f"the end of the last run in {events} cannot be determined: {error!r}")
        return None
    if postmortem is not None:
        problem = write(path_for(events, postmortem.run), postmortem)
        if problem is not None:
            console.warning(f"the previous run was killed; {problem}")
    return postmortem


def _killed(path: Path) -> Postmortem | None:
    run = _last_run(path) if path.is_file() else None
    if run is None or run.end is not None or run.processes[-1].start is None:
        return None
    process = run.processes[-1].process()
    if process is None:
        raise ValueError("its start has no host and pid")
    gone = process.gone()
    if gone is False:
        return None
    why = "" if gone else f"it ran on {process.host}, which cannot be seen from here"
    postmortem = _from_events(run, end_of_killed(run, why=why))
    notes = RankNotes(path, postmortem.run)
    raised = notes.found()
    if raised and not raised[0].follows:
        exception = f"rank {raised[0].rank}: {raised[0].why}"
        postmortem = postmortem._replace(end=postmortem.end._replace(exception=exception))
    return postmortem._replace(
        exception=traces(raised) or None,
        certain=bool(gone),
        stacks=tuple(stacks_of(notes.found(hangs=True))),
    )


def of_hung(
    events: str | os.PathLike[str], *, step: int, why: str, stacks: Sequence[RankStacks]
) -> Postmortem:
    """The postmortem of the last run in an events file, while it hangs."""
    run = _last_run(Path(events)) or Run()
    end = end_of_killed(run, why=why)
    end = end._replace(ending=Ending.STOPPED, step=step, fault=Cause.HANG)
    return _from_events(run, end)._replace(ended=log.now(), stacks=tuple(stacks))


def stacks_of(notes: Iterable[RankNote]) -> list[RankStacks]:
    """The stacks of ranks that hang. Ranks at the same place share an entry."""
    groups: dict[str, list[RankNote]] = {}
    for note in sorted(notes, key=lambda note: note.rank):
        groups.setdefault(note.trace.partition("\nThread ")[0], []).append(note)
    return [
        RankStacks(tuple(note.rank for note in same), same[0].trace) for same in groups.values()
    ]


def _last_run(path: Path) -> Run | None:
    """The run whose process began last in an events file, or None without events."""
    runs = runs_of(log.read(path).runs())
    return runs[-1] if runs else None


def _from_events(run: Run, end: RunEnd) -> Postmortem:
    """The postmortem of the last process of a run, from its events."""
    if not run.processes:
        return Postmortem("", end, lost_events=run.lost)
    last = run.processes[-1]
    return Postmortem(
        last.id,
        end,
        ended=(last.last and last.last.time) or "",
        seconds=None if last.seconds is None else round(last.seconds, 6),
        lost_events=run.lost,
        process=last.process(),
        environment=(last.start and last.start.environment) or {},
    )


def end_of_killed(run: Run, *, why: str = "") -> RunEnd:
    """The facts about a run whose last process was killed."""
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
        damaged=tuple(run.damaged),
        observes=run.observes,
        last_good=run.last_good,
    )


def _cause(flags: Iterable[str]) -> Cause:
    cause = Cause(0)
    for name in flags:
        cause |= Cause.__members__.get(name, Cause.UNKNOWN)  # a name of a newer healcore is unknown
    return cause
