"""One JSON file for how a run ended, whichever way it did."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from healcore.core.verdict import Cause
from healcore.history import Run
from healcore.history.process import KnownGood
from healcore.runtime.events import Log, encoding, reading
from healcore.runtime.events.environment import environment
from healcore.runtime.events.log import now
from healcore.runtime.events.models import Ending, EventRecord, record
from healcore.runtime.events.process import Process, here
from healcore.runtime.events.reading import Event
from healcore.runtime.postmortem.diagnosis import Case, Tried, explain
from healcore.runtime.store import files
from healcore.runtime.store.commit import sweep

SCHEMA = 1

_log = logging.getLogger(__name__)


class Postmortem(NamedTuple):
    """How a run ended. Field by field in docs/events.md."""

    run: str
    """Id of the run, as in its events."""
    ending: str
    """`completed`, `stopped`, `exception`, `signal`, `interrupted` or `killed`."""
    step: int
    """Optimizer steps done; of a killed run that of its last event."""
    diagnosis: str
    """For a person."""
    cause: tuple[str, ...] = ()
    """Of the last incident."""
    incidents: int = 0
    rollbacks: tuple[Tried, ...] = ()
    lr_scale: float = 1.0
    """The learning-rate multiplier at the end."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint."""
    last_good_path: str | None = None
    exception: str | None = None
    """What was raised, with its traceback."""
    ended: str = ""
    """Wall time, ISO 8601, UTC; of a killed run that of its last event."""
    seconds: float | None = None
    """How long it ran, by a monotonic clock."""
    lost_events: int = 0
    """Events that could not be written."""
    process: Process | None = None
    environment: dict[str, str] = {}  # noqa: RUF012 -- never changed
    certain: bool = True
    """False: the process ran on another host and is taken to be gone because a new one began."""


def of(
    case: Case, log: Log, *, seconds: float | None = None, trace: str | None = None
) -> Postmortem:
    """The postmortem of this process.

    Args:
        case: what is known.
        log: of the run.
        seconds: how long it ran.
        trace: the exception with its traceback; without one `case.exception`.
    """
    return Postmortem(
        run=log.run,
        ending=case.ending,
        step=case.step,
        diagnosis=explain(case),
        cause=_names(case),
        incidents=case.incidents,
        rollbacks=case.tried,
        lr_scale=case.lr_scale,
        last_good=case.last_good,
        last_good_path=case.path,
        exception=trace or case.exception,
        ended=now(),
        seconds=seconds,
        lost_events=log.lost,
        process=here(),
        environment=environment(),
    )


def path_for(events: str | os.PathLike[str], run: str) -> Path:
    """Where the postmortem of a run goes: beside its events, one file for each run.

    `run.events.jsonl` has `run.postmortem.<run id>.json`. One name for all would let the next
    run's success take the place of what its predecessor died of.
    """
    path = Path(events)
    stem = re.sub(r"(\.events)?\.jsonl?$", "", path.name)
    safe = re.sub(r"[^\w.-]", "_", run)
    return path.with_name(f"{stem}.postmortem.{safe}.json")


def write(path: str | os.PathLike[str], postmortem: Postmortem) -> str | None:
    """Writes the file whole or not at all. Never raises: it is called while a run is dying.

    Returns:
        What went wrong, in words; None if it is on disk.
    """
    path = Path(path)
    try:
        text = json.dumps({"schema": SCHEMA, **encoding.plain(postmortem)}, indent=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, f"{text}\n".encode("ascii"))
    except Exception as error:
        return f"the postmortem {path} could not be written: {type(error).__name__}: {error}"
    sweep(path.parent)
    return None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What is in a postmortem.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
    """
    return json.loads(Path(path).read_text())


def of_killed(events: str | os.PathLike[str]) -> Postmortem | None:
    """Finds out whether the last run in an events file was killed, and writes its postmortem.

    To be called at the next start, before that writes its own `start`. Never raises.

    Args:
        events: the file. The postmortem goes to `path_for`.

    Returns:
        The postmortem; None if there is no such run, it has written its end, or is still there.
    """
    try:
        found = _killed(Path(events))
    except Exception as error:
        _log.warning("how the last run in %s ended cannot be found out: %r", events, error)
        return None
    if found is not None:
        problem = write(path_for(events, found.run), found)
        if problem is not None:
            _log.warning("%s", problem)
    return found


def _killed(events: Path) -> Postmortem | None:
    if not events.is_file():
        return None
    everything = reading.read(events).events
    run = last_process(everything)
    if run is None or run.end is not None:
        return None
    last = run.processes[-1]
    process, start = last.process(), last.start or EventRecord()
    if process is None:
        raise ValueError("its start has no host and pid")
    gone = process.gone()
    if gone is False:
        return None
    why = "" if gone else f"it ran on {process.host}, which cannot be seen from here"
    case = case_of(run, everything, why=why)
    return Postmortem(
        run=last.id,
        ending=Ending.KILLED,
        step=case.step,
        diagnosis=explain(case),
        cause=_names(case),
        incidents=case.incidents,
        rollbacks=case.tried,
        lr_scale=case.lr_scale,
        last_good=case.last_good,
        ended=last.last.time or "" if last.last else "",
        seconds=None if last.seconds is None else round(last.seconds, 6),
        lost_events=run.lost,
        process=process,
        environment=start.environment or {},
        certain=bool(gone),
    )


def last_process(events: Sequence[Event]) -> Run | None:
    """The process that began last, from its `start` on; None: none has begun.

    Args:
        events: all of a file.
    """
    start = next((event for event in reversed(events) if event["kind"] == "start"), None)
    if start is None:
        return None
    own = [e for e in events if e["run"] == start["run"] and e["seq"] >= start["seq"]]
    run = Run()
    for event in sorted(own, key=lambda event: event["seq"]):
        run.add(event)
    return run


def case_of(run: Run, everything: Iterable[Event], *, why: str = "") -> Case:
    """What is known of a process that was killed.

    Args:
        run: its events.
        everything: of the file: an earlier process may have had the last known-good checkpoint.
        why: for the headline.
    """
    good, seen = KnownGood(), run.last_seen
    for event in everything:
        good.add(record(event)[0])
    return Case(
        ending=Ending.KILLED,
        step=run.last_step or 0,
        why=why,
        cause=_cause(seen.cause),
        onset=seen.onset,
        open=None,
        incidents=run.incident_count,
        readings=seen.readings,
        evidence=seen.evidence,
        batches=seen.batches,
        skips=run.skips,
        tried=tuple(_tried(event) for event in run.rollbacks),
        lr_scale=1.0 if run.lr_scale is None else run.lr_scale,
        verdict=run.rerun or "",
        damaged=tuple(run.damaged),
        observes=run.observes,
        last_good=good.newest,
    )


def _cause(flags: Iterable[str]) -> Cause:
    cause = Cause(0)
    for name in flags:
        cause |= Cause.__members__.get(name, Cause.UNKNOWN)  # a newer healcore's
    return cause


def _tried(event: EventRecord) -> Tried:
    step, lr = event.step or 0, event.lr
    before, after = event.lr_scale_before, event.lr_scale
    return Tried(
        step=step,
        onset=step if event.onset is None else event.onset,
        target=event.checkpoint or 0,
        lr_before=None if lr is None or before is None else lr * before,
        lr_after=None if lr is None or after is None else lr * after,
        left_out=len(event.batches or ()),
    )


def _names(case: Case) -> tuple[str, ...]:
    return tuple(flag.name for flag in Cause if flag.name and flag in case.cause)
