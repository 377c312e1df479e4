"""Writes and reads the postmortem, a JSON file about how a run ended.

docs/events.md describes its fields.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from healcore import console, regular_file
from healcore.core.verdict import Cause
from healcore.events import json_lines, log
from healcore.events.models import Ending, EventRecord
from healcore.history import Run, runs_of
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.postmortem.rank_notes import RankNote, RankNotes, path_of, traces
from healcore.runtime.store import files

SCHEMA = 2


class RankStacks(NamedTuple):
    """The Python stacks of a process that hung."""

    ranks: tuple[int, ...]
    """Ranks whose training threads were at the same place. `stacks` is that of the first rank."""
    stacks: str


def content(
    end: RunEnd,
    *,
    trace: str | None = None,
    certain: bool = True,
    stacks: Sequence[RankStacks] = (),
    lost: int | None = None,
) -> dict[str, Any]:
    """The content of the file as JSON values.

    Args:
        end: how the run has ended.
        trace: the exception with its traceback, or None.
        certain: False for a run on another host, which is assumed to have ended because a new run
            began.
        stacks: the stacks of a run that hung, for all ranks that have reported them.
        lost: number of lost events, or None for the number in the events.
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
        "diagnosis": explain(end),
        "cause": end.cause | end.fault & Cause.HANG,
        "incidents": counts.incidents,
        "clips": counts.clips or 0,
        "skips": counts.skips,
        "undone_skips": counts.undone_skips,
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
        "stacks": tuple(stacks),
    }
    return json_lines.to_json(fields)


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


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """The postmortem file of a run: `run.postmortem.<run id>.json` next to `run.events.jsonl`."""
    return path_of(Path(events), "postmortem", run)


def write(events: Path, end: RunEnd, **facts: Any) -> str | None:
    """Writes the postmortem next to the events file, atomically; `facts` as for `content`.

    Returns the error, if any, and never raises, because the run ends.
    """
    path = path_for(events, end.run.processes[-1].id)
    try:
        text = json.dumps(content(end, **facts), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a postmortem file. Raises OSError, or ValueError if it is not JSON."""
    return json.loads(regular_file.read(Path(path)))


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

    The next process calls it before it writes its own `start`. A run that has written its end or
    is still running has no such postmortem.
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
    problem = write(
        events,
        end,
        trace=traces(raised) or None,
        certain=bool(gone),
        stacks=stacks_of(notes.found(hangs=True)),
    )
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
    return problem is None


def stacks_of(notes: Iterable[RankNote]) -> list[RankStacks]:
    """The stacks of ranks that hang. Ranks at the same place share an entry."""
    groups: dict[str, list[RankNote]] = {}
    for note in sorted(notes, key=lambda note: note.rank):
        groups.setdefault(note.trace.partition("\nThread ")[0], []).append(note)
    return [
        RankStacks(tuple(note.rank for note in same), same[0].trace) for same in groups.values()
    ]
