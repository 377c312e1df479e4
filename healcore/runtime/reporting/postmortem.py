"""Writes and reads the postmortem, a JSON file about how a run ended. Fields: docs/events.md."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from healcore import console, regular_file
from healcore.core.decision import LASTING, Cause
from healcore.events import log
from healcore.events.log import process_path, to_json
from healcore.events.metrics import COMPARED
from healcore.events.models import Ending, EventRecord
from healcore.history import RunHistory, runs_of
from healcore.history.curves import last_rows
from healcore.history.run_history import changes_made
from healcore.runtime.faults.failures import causes_of
from healcore.runtime.reporting.diagnosis import RunOutcome, explain
from healcore.runtime.store import files

SCHEMA = 2

LAST_NUMBERS = ("loss", "grad_norm", "threshold", "grad_scale", "lr_scale", *COMPARED)
"""Fields of a metrics line that are numbers of its step alone."""
_OF_OUTCOME = ("ending", "step", "metrics", "steps_lost", "unrepaired", "lr_scale", "last_good")
_OF_OUTCOME += ("last_good_path", "exception")
"""Fields of a `RunOutcome` that the file has under the same names."""


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
    """Writes the postmortem next to the events file, atomically.

    Never raises, because the run ends: an error here would hide the exception that ended it.

    Args:
        events: the events file of the run.
        outcome: how the run has ended.
        trace: the exception with its traceback, or None for the line in `outcome`.
        stacks: stacks of a hanging run, see `EventRecord.stacks`.

    Returns:
        A sentence about the error, or None if the postmortem was written.
    """
    path = path_for(events, outcome.history.processes[-1].id)
    try:
        fields = _fields(outcome) | {"stacks": stacks}
        if trace:
            fields["exception"] = trace
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{json.dumps(to_json(fields), indent=2)}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def _fields(outcome: RunOutcome) -> dict[str, Any]:
    """The fields of the file, see `write`."""
    history, counts = outcome.history, outcome.counts
    process = history.processes[-1]
    seconds, ended = process.seconds, process.last.time
    killed = outcome.ending == Ending.KILLED
    if not killed:  # otherwise the calling process is another process
        ended = log.now()
        if process.first.mono is not None:
            seconds = time.monotonic() - process.first.mono
    changes = changes_made(
        {"clips": counts.clips, "skips": counts.skips}, observes=history.observes
    )
    return {
        "schema": SCHEMA,
        "run": process.id,
        **{name: getattr(outcome, name) for name in _OF_OUTCOME},
        "cause": outcome.cause | outcome.lasting | outcome.fault & Cause.HANG,
        "incidents": counts.incidents,
        **changes,
        "rollbacks": [_rollback_fields(event) for event in history.rollbacks],
        "ended": ended,
        "seconds": seconds and round(seconds, 6),
        "lost_events": history.lost,
        "process": process.identity(),
        "environment": process.start and process.start.environment,
        "certain": not killed or history.state is Ending.GONE,
        "diagnosis": explain(outcome),
    }


def _rollback_fields(event: EventRecord) -> dict[str, Any]:
    """A rollback as an entry of the postmortem's `rollbacks`."""
    return {
        **{name: getattr(event, name) for name in ("step", "onset", "lr", "lr_limit", "lr_scale")},
        "target": event.checkpoint,
        "skipped": len(event.batches or ()),
        "repeated": event.steps_repeated or 0,
        "lost": event.steps_lost or 0,
    }


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


# -- a killed run ---------------------------------------------------------------------------------


def read_last_run(events: Path) -> RunHistory | None:
    """Reads the run whose process began last in an events file.

    Never raises, because the next run starts also if the file of the last run is damaged.

    Args:
        events: the events file, which need not exist.

    Returns:
        What happened in the run, or None without a run.
    """
    try:
        runs = runs_of(log.read(events).by_process()) if events.is_file() else []
    except Exception as error:
        console.warning(f"the last run in {events} cannot be read: {error!r}")
        return None
    return runs[-1] if runs else None


def write_for_killed(
    events: Path, history: RunHistory, metrics: Path | None = None
) -> RunOutcome | None:
    """Writes the postmortem of a run that was killed.

    A killed process writes nothing at its end. So the next process calls this function before it
    writes its own `start`.

    Args:
        events: the events file.
        history: the last run in the file, from `read_last_run`.
        metrics: the metrics file, or None without one.

    Returns:
        What is known about the end, if a postmortem was written. None if the run has ended in
        another way, or if its process is still running.
    """
    killed = history.state in (Ending.GONE, Ending.UNKNOWN)
    if not killed or history.processes[-1].identity() is None:
        return None
    outcome = outcome_of_killed(history, metrics)
    problem = write(events, outcome)
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
    return outcome if problem is None else None


def outcome_of_killed(history: RunHistory, metrics: Path | None = None) -> RunOutcome:
    """Finds out what is known about the end of a killed run.

    A healthy run has few events, so the last step and its numbers are read from the metrics file.

    Args:
        history: the run, whose last process was killed.
        metrics: the metrics file, or None without one.

    Returns:
        The outcome, from which the diagnosis is written. The run may have done more steps.
    """
    process, why = history.processes[-1].identity(), ""
    if history.state is Ending.UNKNOWN and process is not None:
        why = f"on {process.host}, whose processes this host cannot see"
    step, lasting, numbers = history.step or 0, Cause(0), {}
    rollbacks = [datetime.fromisoformat(each.time) for each in history.rollbacks if each.time]
    try:
        rows: dict[str, Any] = {}
        if metrics is not None and metrics.is_file():
            rows = last_rows(metrics, history.processes[-1].id)
        for engine, row in rows.items():
            # A row has milliseconds. The steps before the last rollback are undone.
            if any(float(row["time"]) <= round(each.timestamp(), 3) for each in rollbacks):
                continue
            step = max(step, row["step"] + 1)
            lasting |= causes_of(map(str, row.get("cause", ()))) & LASTING
            for name in LAST_NUMBERS:
                if name in row:
                    numbers["/".join(filter(None, ("heal", engine, name)))] = row[name]
    except Exception as error:  # the file may be of another program
        console.warning(f"the last metrics in {metrics} cannot be read: {error!r}")
    scales = [event.lr_scale for event in history.events if event.lr_scale is not None]
    return RunOutcome(
        history,
        Ending.KILLED,
        step,
        history.counts(),
        why=why,
        lr_scale=scales[-1] if scales else 1.0,
        last_good=history.last_good,
        lasting=lasting,
        metrics=numbers,
        steps_lost=history.steps_lost,
        unrepaired=history.unrepaired,
    )
