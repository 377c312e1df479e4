"""Writes and reads the postmortem, a JSON file about how a run ended. Fields: docs/events.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore import regular_file
from healcore.core.decision import Cause
from healcore.events.log import now, process_path, to_json
from healcore.events.models import Ending, EventRecord
from healcore.events.process import Process
from healcore.history.run_history import changes_made
from healcore.runtime.reporting.diagnosis import RunOutcome, explain
from healcore.runtime.store import files

SCHEMA = 3

_OF_OUTCOME = ("ending", "step", "metrics", "steps_lost", "unrepaired", "lr_scale", "last_good")
_OF_OUTCOME += ("last_good_path", "exception")
"""Fields of a `RunOutcome` that the file has under the same names."""
_OF_ROLLBACK = ("step", "onset", "lr", "lr_limit", "lr_scale", "steps_repeated", "steps_lost")
_OF_ROLLBACK += ("checkpoint", "batches")
"""Fields of an event `rollback` that the file has under the same names."""


def path_for(events: str | os.PathLike[str], process: str) -> Path:
    """The path of the postmortem of a process.

    Args:
        events: the events file, `run.events.jsonl`.
        process: id of the process that ended.

    Returns:
        `run.postmortem.<process id>.json` in the same directory.
    """
    return process_path(events, process, "postmortem", ".json")


def write(
    events: Path,
    outcome: RunOutcome,
    *,
    trace: str | None = None,
    stacks: Sequence[dict[str, Any]] = (),
) -> str | None:
    """Writes the postmortem of the last process of a run next to the events file, atomically.

    A killed process writes none, so the next start calls this function for it. Never raises,
    because the run ends: an error here would hide the exception that ended it.

    Args:
        events: the events file of the run.
        outcome: how the run has ended.
        trace: the exception with its traceback, or None for the line in `outcome`.
        stacks: stacks of a hanging run, see `EventRecord.stacks`.

    Returns:
        A sentence about the error, or None if the postmortem was written.
    """
    history, counts = outcome.history, outcome.counts
    process = history.processes[-1]
    path = path_for(events, process.id)
    start = process.start or EventRecord()
    ended, seconds = now(), time.monotonic() - (process.first.mono or 0)
    if outcome.ending in (Ending.GONE, Ending.UNKNOWN):  # the calling process is another one
        ended, seconds = process.last.time, process.seconds or 0.0
    changes = {"clips": counts.clips, "skips": counts.skips}
    try:
        rollbacks: list[dict[str, Any]] = []
        for event in history.of("rollback"):
            rollbacks.append({name: getattr(event, name) for name in _OF_ROLLBACK})
        fields = {
            "schema": SCHEMA,
            "run": process.id,
            **{name: getattr(outcome, name) for name in _OF_OUTCOME},
            "cause": outcome.cause | outcome.lasting | outcome.fault & Cause.HANG,
            "incidents": counts.incidents,
            **changes_made(changes, observes=history.observes),
            "rollbacks": rollbacks,
            "ended": ended,
            "seconds": round(seconds, 6),
            "lost_events": history.lost,
            "process": {name: getattr(start, name) for name in Process._fields},
            "environment": start.environment,
            "diagnosis": explain(outcome),
            "stacks": stacks,
        }
        if trace:
            fields["exception"] = trace
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{json.dumps(to_json(fields), indent=2)}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a postmortem file.

    Args:
        path: the file.

    Returns:
        The JSON object; docs/events.md lists its fields.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not JSON.
    """
    return json.loads(regular_file.read(Path(path)))
