"""Writes and reads the postmortem, a JSON file about how a run ended. Fields: docs/events.md."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore import console, regular_file
from healcore.core.decision import Cause
from healcore.events import log
from healcore.events.log import stem
from healcore.events.models import Ending, EventRecord
from healcore.history import Run, runs_of
from healcore.history.run import by_name
from healcore.runtime.store import files
from healcore.runtime.story.diagnosis import RunEnd, explain

SCHEMA = 2


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """The file `run.postmortem.<run id>.json` of a run, next to `run.events.jsonl`."""
    path = Path(events)
    safe = re.sub(r"[^\w.-]", "_", run)
    return path.with_name(f"{stem(path)}.postmortem.{safe}.json")


def write(
    events: Path,
    end: RunEnd,
    *,
    trace: str | None = None,
    certain: bool = True,
    stacks: Sequence[dict[str, Any]] = (),
    lost: int | None = None,
) -> str | None:
    """Writes the postmortem next to the events file, atomically.

    Returns the error, if any, and never raises, because the run ends. `trace` is the exception with
    its traceback, `stacks` are those of a hang; `lost` is None for the number in the events.
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
        "steps_lost": end.steps_lost,
        "lr_scale": end.lr_scale,
        "last_good": end.last_good,
        "last_good_path": end.last_good_path,
        "exception": trace or end.exception,
        "ended": last.time or "" if killed else log.now(),
        "seconds": None if seconds is None else round(seconds, 6),
        "lost_events": run.lost if lost is None else lost,
        "process": process.identity(),
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
        "repeated": event.steps_repeated or 0,
        "lost": event.steps_lost or 0,
    }


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a postmortem file. Raises OSError, or ValueError if it is not JSON."""
    return json.loads(regular_file.read(Path(path)))


# -- a killed run ---------------------------------------------------------------------------------


def read_last_run(events: Path) -> Run | None:
    """The run whose process began last in an events file, or None without one. Never raises."""
    try:
        runs = runs_of(log.read(events).runs()) if events.is_file() else []
    except Exception as error:
        console.warning(f"the last run in {events} cannot be read: {error!r}")
        runs = []
    return runs[-1] if runs else None


def write_for_killed(events: Path, run: Run) -> bool:
    """Writes the postmortem of a run that was killed. Returns whether it was written.

    The next process calls this function before it writes its own `start`.
    """
    process = run.processes[-1].identity()
    gone = False if run.end is not None or process is None else process.gone()
    if process is None or gone is False:
        return False
    end = RunEnd(
        run,
        Ending.KILLED,
        run.step or 0,
        run.counts(),
        why="" if gone else f"it ran on {process.host}, whose processes this host cannot see",
        lr_scale=1.0 if run.lr_scale is None else run.lr_scale,
        last_good=run.last_good,
        steps_lost=sum(event.steps_lost or 0 for event in run.rollbacks),
        why_lost=next((e.why or "" for e in reversed(run.rollbacks) if e.steps_lost), ""),
    )
    problem = write(events, end, certain=bool(gone))
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
    return problem is None
