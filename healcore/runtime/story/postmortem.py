"""Writes and reads the postmortem, a JSON file about how a run ended. Fields: docs/events.md."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from healcore import console, regular_file
from healcore.core.decision import LASTING, Cause
from healcore.events import log
from healcore.events.log import COMPARED, stem
from healcore.events.models import Ending, EventRecord
from healcore.history import Run, runs_of
from healcore.history.curves import read_last_rows
from healcore.history.run import by_name
from healcore.runtime.faults.failures import causes_of
from healcore.runtime.store import files
from healcore.runtime.story.diagnosis import RunEnd, explain

SCHEMA = 2

LAST_NUMBERS = ("loss", "grad_norm", "threshold", "grad_scale", "lr_scale", *COMPARED)
"""Fields of a metrics line that are numbers of its step alone."""


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """The file `run.postmortem.<run id>.json` of a run, next to `run.events.jsonl`."""
    return path_of(events, run, "postmortem", ".json")


def path_of(events: str | os.PathLike[str], run: str, kind: str, suffix: str = "") -> Path:
    """A file of a run next to its events."""
    path = Path(events)
    safe = re.sub(r"[^\w.-]", "_", run)
    return path.with_name(f"{stem(path)}.{kind}.{safe}{suffix}")


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
        "cause": end.cause | end.lasting | end.fault & Cause.HANG,
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


def same_end_before(events: Path, step: int, kind: str) -> str:
    """When an earlier process ended after `step` steps by an exception of this type, or ""."""
    ends: list[dict[str, Any]] = []
    for path in events.parent.glob(f"{stem(events)}.postmortem.*.json"):
        with contextlib.suppress(OSError, ValueError):
            ends.append(read(path))
    named = re.compile(rf"^(\w+\.)*{re.escape(kind)}\b", re.MULTILINE)
    same = [
        str(each.get("ended"))
        for each in ends
        if each.get("step") == step and named.search(str(each.get("exception")))
    ]
    return max(same, default="")


# -- a killed run ---------------------------------------------------------------------------------


def read_last_run(events: Path) -> Run | None:
    """The run whose process began last in an events file, or None without one. Never raises."""
    try:
        runs = runs_of(log.read(events).runs()) if events.is_file() else []
    except Exception as error:
        console.warning(f"the last run in {events} cannot be read: {error!r}")
        runs = []
    return runs[-1] if runs else None


def write_for_killed(events: Path, run: Run, metrics: Path | None = None) -> bool:
    """Writes the postmortem of a run that was killed. Returns whether it was written.

    The next process calls this function before it writes its own `start`. Events are rare in a
    healthy run, so the last step and its numbers come from the file `metrics`, if there is one.
    """
    process = run.processes[-1].identity()
    gone = False if run.end is not None or process is None else process.gone()
    if process is None or gone is False:
        return False
    rows = _last_rows(metrics, run)
    end = RunEnd(
        run,
        Ending.KILLED,
        max([run.step or 0, *(row["step"] + 1 for row in rows.values())]),
        run.counts(),
        why="" if gone else f"it ran on {process.host}, whose processes this host cannot see",
        lr_scale=1.0 if run.lr_scale is None else run.lr_scale,
        last_good=run.last_good,
        lasting=_lasting_causes(rows),
        metrics=_last_metrics(rows),
        steps_lost=sum(event.steps_lost or 0 for event in run.rollbacks),
        why_lost=next((e.why or "" for e in reversed(run.rollbacks) if e.steps_lost), ""),
    )
    problem = write(events, end, certain=bool(gone))
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
    return problem is None


def _last_rows(metrics: Path | None, run: Run) -> dict[str, dict[str, Any]]:
    """Engine -> the last row of a killed run, unless a rollback has undone it. Never raises."""
    try:
        if metrics is None or not metrics.is_file():
            return {}
        rows = read_last_rows(metrics, run.processes[-1].id)
        since = max((_seconds(event.time) for event in run.rollbacks), default=0.0)
        return {name: row for name, row in rows.items() if float(row.get("time", 0.0)) > since}
    except Exception as error:  # a file of somebody else
        console.warning(f"the last metrics in {metrics} cannot be read: {error!r}")
        return {}


def _seconds(time: str | None) -> float:
    """The time of an event, as in the rows of the metrics: seconds since 1970, in milliseconds."""
    return 0.0 if time is None else round(datetime.fromisoformat(time).timestamp(), 3)


def _lasting_causes(rows: Mapping[str, Mapping[str, Any]]) -> Cause:
    """The lasting causes in the last rows."""
    named = [row["cause"] for row in rows.values() if isinstance(row.get("cause"), list)]
    return LASTING & causes_of(str(name) for causes in named for name in causes)


def _last_metrics(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of the last rows, with the names of `Healer.metrics`."""
    return {
        f"heal/{engine}/{name}" if engine else f"heal/{name}": row[name]
        for engine, row in rows.items()
        for name in LAST_NUMBERS
        if name in row
    }
