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
from healcore.events.json_lines import to_json
from healcore.events.log import process_path
from healcore.events.metrics import COMPARED
from healcore.events.models import Ending, EventRecord
from healcore.history import RunHistory, RunState, runs_of
from healcore.history.curves import last_rows
from healcore.history.incidents import name_changes
from healcore.runtime.faults.failures import causes_of
from healcore.runtime.reporting.diagnosis import RunOutcome, explain
from healcore.runtime.store import files

SCHEMA = 2

LAST_NUMBERS = ("loss", "grad_norm", "threshold", "grad_scale", "lr_scale", *COMPARED)
"""Fields of a metrics line that are numbers of its step alone."""


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
    certain: bool = True,
    stacks: Sequence[dict[str, Any]] = (),
) -> str | None:
    """Writes the postmortem next to the events file, atomically.

    Never raises, because the run ends: an error here would hide the exception that ended it.

    Args:
        events: the events file of the run.
        outcome: how the run has ended.
        trace: the exception with its traceback, or None for the line in `outcome`.
        certain: False if the run may still be running, on a machine that cannot be asked.
        stacks: stacks of a hanging run, see `EventRecord.stacks`.

    Returns:
        A sentence about the error, or None if the postmortem was written.
    """
    path = path_for(events, outcome.history.processes[-1].id)
    try:
        fields = _fields(outcome, trace, certain, stacks)
        text = json.dumps(to_json(fields), indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    return None


def _fields(
    outcome: RunOutcome,
    trace: str | None,
    certain: bool,
    stacks: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The fields of the file, see `write`."""
    history, counts = outcome.history, outcome.counts
    process = history.processes[-1]
    seconds, ended = process.seconds, process.last.time
    if outcome.ending != Ending.KILLED:  # otherwise the calling process is another process
        ended = log.now()
        if process.first.mono is not None:
            seconds = time.monotonic() - process.first.mono
    return {
        "schema": SCHEMA,
        "run": process.id,
        "ending": outcome.ending,
        "step": outcome.step,
        "cause": outcome.cause | outcome.lasting | outcome.fault & Cause.HANG,
        "incidents": counts.incidents,
        **name_changes(observes=history.observes, clips=counts.clips, skips=counts.skips),
        "metrics": outcome.metrics,
        "rollbacks": [_rollback_fields(event) for event in history.rollbacks],
        "steps_lost": outcome.steps_lost,
        "unrepaired": outcome.unrepaired,
        "lr_scale": outcome.lr_scale,
        "last_good": outcome.last_good,
        "last_good_path": outcome.last_good_path,
        "exception": trace or outcome.exception,
        "ended": ended,
        "seconds": seconds and round(seconds, 6),
        "lost_events": history.lost,
        "process": process.identity(),
        "environment": process.start and process.start.environment,
        "certain": certain,
        "stacks": stacks,
        "diagnosis": explain(outcome),
    }


def _rollback_fields(event: EventRecord) -> dict[str, Any]:
    """A rollback as an entry of the postmortem's `rollbacks`."""
    return {
        "step": event.step,
        "onset": event.onset,
        "target": event.checkpoint,
        "lr": event.lr,
        "lr_limit": event.lr_limit,
        "lr_scale": event.lr_scale,
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
        if not events.is_file():
            return None
        runs = runs_of(log.read(events).by_process())
    except Exception as error:
        console.warning(f"the last run in {events} cannot be read: {error!r}")
        return None
    if not runs:
        return None
    return runs[-1]


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
    state = history.state
    if state not in (RunState.GONE, RunState.UNKNOWN) or history.processes[-1].identity() is None:
        return None
    outcome = outcome_of_killed(history, metrics)
    problem = write(events, outcome, certain=state is RunState.GONE)
    if problem is not None:
        console.warning(f"the previous run was killed; {problem}")
        return None
    return outcome


def outcome_of_killed(history: RunHistory, metrics: Path | None = None) -> RunOutcome:
    """Finds out what is known about the end of a killed run.

    A healthy run has few events, so the last step and its numbers are read from the metrics file.

    Args:
        history: the run, whose last process was killed.
        metrics: the metrics file, or None without one.

    Returns:
        The outcome, from which the diagnosis is written. The run may have done more steps.
    """
    why = ""
    killed = history.processes[-1]
    process = killed.identity()
    if history.state is RunState.UNKNOWN and process is not None:
        why = f"it ran on {process.host}, whose processes this host cannot see"
    step, lasting, numbers = history.step or 0, Cause(0), {}
    last_rollback = max((_seconds(event) for event in history.rollbacks), default=0.0)
    try:
        rows = {} if metrics is None or not metrics.is_file() else last_rows(metrics, killed.id)
        for engine, row in rows.items():
            if float(row["time"]) <= last_rollback:
                continue  # the rollback has undone the step
            step = max(step, row["step"] + 1)
            lasting |= causes_of(map(str, row.get("cause", ()))) & LASTING
            for name in LAST_NUMBERS:
                if name in row:
                    numbers["/".join(filter(None, ("heal", engine, name)))] = row[name]
    except Exception as error:  # the file may be of another program
        console.warning(f"the last metrics in {metrics} cannot be read: {error!r}")
    return RunOutcome(
        history,
        Ending.KILLED,
        step,
        history.counts(),
        why=why,
        lr_scale=1.0 if history.lr_scale is None else history.lr_scale,
        last_good=history.last_good,
        lasting=lasting,
        metrics=numbers,
        steps_lost=history.steps_lost,
        unrepaired=history.unrepaired,
    )


def _seconds(event: EventRecord) -> float:
    """The time of an event in seconds since 1970, to milliseconds as in a row of metrics."""
    return round(datetime.fromisoformat(event.time).timestamp(), 3) if event.time else 0.0
