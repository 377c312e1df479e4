"""Writes and reads the postmortem, a JSON file about how a run ended, and the notes of its ranks.

A rank that ends alone or hangs cannot use collectives, so it leaves a note next to the events file.
Rank 0 reads the notes at its end, or the next start after a kill. docs/events.md has the fields.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from healcore import console, regular_file
from healcore.core.decision import Cause
from healcore.events import log
from healcore.events.log import stem
from healcore.events.models import Ending, EventRecord
from healcore.history import Run, runs_of
from healcore.history.incident import by_name
from healcore.runtime.store import files
from healcore.runtime.story.diagnosis import RunEnd, explain

SCHEMA = 2

_NOTES = {False: "end.rank", True: "hang.rank"}
"""Whether a rank hangs -> part of the file name after the stem of the events file."""
_MAX_NOTE_BYTES = 1 << 20
_MAX_TEXT = 200_000  # largest number of characters of a traceback or of stacks
_MAX_TRACES = 4  # largest number of tracebacks in the postmortem


def _safe(run: str) -> str:
    return re.sub(r"[^\w.-]", "_", run)


def path_for(events: str | os.PathLike[str], run: str, part: str = "postmortem") -> Path:
    """The file `run.<part>.<run id>.json` of a run, next to `run.events.jsonl`."""
    path = Path(events)
    return path.with_name(f"{stem(path)}.{part}.{_safe(run)}.json")


def write(
    events: Path,
    end: RunEnd,
    *,
    trace: str | None = None,
    certain: bool = True,
    stacks: Iterable[dict[str, Any]] = (),
    lost: int | None = None,
) -> str | None:
    """Writes the postmortem next to the events file, atomically.

    Returns the error, if any, and never raises, because the run ends. `trace` is the exception with
    its traceback, `stacks` is from `stacks_of`; `lost` is None for the number in the events.
    """
    run, counts, process = end.run, end.counts, end.run.processes[-1]
    start, last = process.start or EventRecord(), process.last or EventRecord()
    killed = end.ending == Ending.KILLED
    seconds = process.seconds
    if process.began is not None and not killed:
        seconds = time.monotonic() - process.began
    fields = {
        "schema": SCHEMA,
        "run": process.id,
        "ending": end.ending,
        "step": end.step,
        "cause": end.cause | end.fault & Cause.HANG,
        "incidents": counts.incidents,
        **by_name(observes=run.observes, clips=counts.clips or 0, skips=counts.skips),
        "metrics": end.metrics,
        "rollbacks": [_rollback(event) for event in run.rollbacks],
        "lr_scale": end.lr_scale,
        "last_good": end.last_good,
        "last_good_path": end.last_good_path,
        "exception": trace or end.exception,
        "ended": last.time or "" if killed else log.now(),
        "seconds": None if seconds is None else round(seconds, 6),
        "lost_events": run.lost if lost is None else lost,
        "process": process.process(),
        "environment": start.environment or {},
        "certain": certain,
        "stacks": list(stacks),
    }
    path = path_for(events, process.id)
    try:
        fields["diagnosis"] = explain(end)
        text = json.dumps(log.to_json(fields), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def _rollback(event: EventRecord) -> dict[str, Any]:
    return {
        "step": event.step or 0,
        "onset": event.step or 0 if event.onset is None else event.onset,
        "target": event.checkpoint,
        "lr": event.lr,
        "lr_limit": event.lr_limit,
        "lr_scale": 1.0 if event.lr_scale is None else event.lr_scale,
        "skipped": len(event.batches or ()),
    }


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a postmortem file. Raises OSError, or ValueError if it is not JSON."""
    return json.loads(regular_file.read(Path(path)))


# -- a killed run ---------------------------------------------------------------------------------


def last_run(events: Path) -> Run | None:
    """The run whose process began last in an events file, or None without one. Never raises."""
    try:
        runs = runs_of(log.read(events).runs()) if events.is_file() else []
    except Exception as error:
        console.warning(f"the last run in {events} cannot be read: {error!r}")
        runs = []
    return runs[-1] if runs else None


def of_killed(events: Path, run: Run) -> bool:
    """Writes the postmortem of a run that was killed. Returns whether it was written.

    The next process calls this function before it writes its own `start`.
    """
    process = run.processes[-1].process()
    gone = False if run.end is not None or process is None else process.gone()
    if process is None or gone is False:
        return False
    notes = RankNotes(events, run.processes[-1].id)
    raised = notes.found()
    exception = f"rank {raised[0].rank}: {raised[0].why}" if raised else None
    end = RunEnd(
        run,
        Ending.KILLED,
        run.step or 0,
        run.counts(),
        why="" if gone else f"it ran on {process.host}, which cannot be seen from here",
        exception=exception if raised and not raised[0].follows else None,
        lr_scale=1.0 if run.lr_scale is None else run.lr_scale,
        last_good=run.last_good,
    )
    stacks = stacks_of(notes.found(hangs=True))
    problem = write(events, end, trace=tracebacks_text(raised), certain=bool(gone), stacks=stacks)
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
    return problem is None


# -- notes of ranks -------------------------------------------------------------------------------


class RankNote(BaseModel):
    """How one rank ended, or where it hangs."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    rank: int
    ending: Ending | None = None  # None for a rank that hangs
    step: int  # optimizer steps done
    why: str  # the exception, the reason of a stop, or the signal, in one line
    trace: str = ""  # the exception with its traceback, or the stacks of all threads
    cause: list[str] = []  # names of the causes of the exception
    sign: str = ""  # evidence for the causes: `Fault.sign`
    follows: bool = False
    """Whether another rank is the cause: a connection broke, or a rank was late."""
    time: float  # Unix time


class RankNotes(NamedTuple):
    """The notes of one run."""

    events: Path | None  # events file of rank 0, or None for no notes
    run: str  # id of rank 0's run

    def leave(self, note: RankNote) -> None:
        """Writes the note of this rank. Never raises, because the run is ending."""
        if self.events is None:
            return
        short = note.model_copy(update={"why": note.why[:2000], "trace": note.trace[-_MAX_TEXT:]})
        path = path_for(self.events, self.run, f"{_NOTES[note.ending is None]}{note.rank}")
        with suppress(OSError, UnicodeError):
            files.replace(path, short.model_dump_json().encode())

    def found(self, *, hangs: bool = False) -> list[RankNote]:
        """Reads the notes of the other ranks. Ranks that failed by themselves come first."""
        notes = []
        for path in self._paths(_NOTES[hangs], _safe(self.run)):
            with suppress(OSError, ValueError):
                notes.append(RankNote.model_validate_json(regular_file.read(path, _MAX_NOTE_BYTES)))
        return sorted(notes, key=lambda note: (note.follows, note.time))

    def remove(self) -> None:
        """Removes the notes of this run and of earlier runs."""
        for kind in _NOTES.values():
            for path in self._paths(kind, "*"):
                with suppress(OSError):
                    path.unlink()

    def _paths(self, kind: str, run: str) -> list[Path]:
        if self.events is None:
            return []
        start = glob.escape(f"{stem(self.events)}.{kind}")
        return sorted(self.events.parent.glob(f"{start}*.{run}.json"))


def tracebacks_text(notes: Iterable[RankNote]) -> str | None:
    """The first few tracebacks, each with its rank, as text, or None without one."""
    shown = [f"rank {note.rank}:\n{note.trace}" for note in notes if note.trace]
    return "\n".join(shown[:_MAX_TRACES]) or None


def stacks_of(notes: Iterable[RankNote]) -> list[dict[str, Any]]:
    """The stacks of ranks that hang. Ranks whose training threads are at one place share them."""
    groups: dict[str, list[RankNote]] = {}
    for note in sorted(notes, key=lambda note: note.rank):
        groups.setdefault(note.trace.partition("\nThread ")[0], []).append(note)
    return [
        {"ranks": [note.rank for note in same], "stacks": same[0].trace} for same in groups.values()
    ]


def of_ranks(notes: Iterable[RankNote]) -> list[dict[str, Any]]:
    """How each rank ended, for the field `of_ranks` of the event `end`."""
    return [
        {"rank": note.rank, "outcome": note.ending, "why": f"step {note.step}: {note.why:.300}"}
        for note in sorted(notes, key=lambda note: note.rank)
    ]
