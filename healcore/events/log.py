"""Writes events to the events file, and reads events from a file that may have damaged lines.

A disk failure loses events but does not stop the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from healcore import console, regular_file
from healcore.events import json_lines
from healcore.events.process import current_process, environment

SCHEMA = 2
"""Version of the format. Changed or removed fields need a new version, added fields do not."""

Event = dict[str, Any]

_DURABLE = frozenset({"start", "incident", "rollback", "stop", "end"})
"""Kinds for which the log waits for the disk, so that a power cut cannot lose the event.

A kill loses no event: the kernel has the line when `write` returns. A power cut loses lines that
the kernel has not yet written to the disk (on Linux about 30 s). Alarms are too many to wait for.
"""


# -- writing --------------------------------------------------------------------------------------


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises. The field `lost` of the next event has the number of lost events. The logger
    `healcore` reports the first loss.

    Args:
        path: events file, or None to write nothing.
        run: id of this process, or None for a new id.
        follow_links: as in `json_lines.append`.

    Attributes:
        seq: number of the next event, from 0.
        lost: number of lost events.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        run: str | None = None,
        follow_links: bool = True,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.run = run or _new_run_id()
        self.follow_links = follow_links
        self.seq = 0
        self.lost = 0
        self._reported = 0
        # Re-entrant, because a signal handler may write while it interrupts a `write`.
        self._lock = threading.RLock()

    def write(self, kind: str, *, step: int | None, **fields: Any) -> Event:
        """Appends one event. Returns the event as a reader of the file reads it.

        `kind` is a key of `schema.KINDS`; `start` also gets the process and its environment. `step`
        is the index of the optimizer step, or None. Fields that are None are not written.
        """
        with self._lock:
            seq = self.seq
            self.seq += 1  # before writing: a signal handler may interrupt and needs its own number
            line, lost = self._line(seq, kind, step, fields), self.lost
            if self.path is not None:
                durable, links = kind in _DURABLE, self.follow_links
                try:
                    json_lines.append(self.path, line, durable=durable, follow_links=links)
                    self._reported = lost
                except Exception as error:
                    self._count_lost(error)
            return json.loads(line)

    def _line(self, seq: int, kind: str, step: int | None, fields: dict[str, Any]) -> bytes:
        present = {name: value for name, value in fields.items() if value is not None}
        if kind == "start":
            present = {**current_process()._asdict(), "environment": environment(), **present}
        if self.lost > self._reported:
            present["lost"] = self.lost - self._reported
        return json_lines.encode(
            {
                "schema": SCHEMA,
                "seq": seq,
                "run": self.run,
                "time": now(),
                "mono": round(time.monotonic(), 6),
                "kind": kind,
                "step": step,
                **present,
            }
        )

    def _count_lost(self, error: Exception) -> None:
        self.lost += 1
        if self.lost == 1:
            why = f"{self.path} ({type(error).__name__}: {error})"
            with contextlib.suppress(Exception):  # from the user's logging handlers
                console.warning(f"events are being lost, training continues: {why}")


def _new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def now() -> str:
    """Returns the wall time in UTC, as ISO 8601 with microseconds."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


# -- reading --------------------------------------------------------------------------------------


class LineProblem(NamedTuple):
    """A damaged or unexpected line. `line` counts from 1."""

    line: int
    problem: str


class History(NamedTuple):
    """The events of a file in file order, and its damaged or unexpected lines."""

    events: list[Event]
    problems: list[LineProblem]

    def runs(self) -> dict[str, list[Event]]:
        """Returns run id -> events, sorted by `seq` because clocks may jump."""
        runs: dict[str, list[Event]] = {}
        for event in self.events:
            runs.setdefault(event["run"], []).append(event)
        return {run: sorted(events, key=lambda event: event["seq"]) for run, events in runs.items()}


def read(path: str | os.PathLike[str]) -> History:
    """Reads an events file, to which a process may still write. Raises OSError.

    Skips and lists damaged lines, such as lines torn by a kill, a full disk or a power cut. An
    incomplete last line counts as damaged. Uses about 30 bytes of memory per byte of the file.
    """
    events: list[Event] = []
    problems: list[LineProblem] = []
    with open(path, "rb", opener=regular_file.opener) as file:
        for number, line in enumerate(json_lines.iter_lines(file), start=1):
            if not line.strip():  # two writers added a newline to the same torn line
                continue
            event = parse(line)
            if isinstance(event, str):
                torn = not line.endswith(b"\n")
                problems.append(LineProblem(number, f"torn: {event}" if torn else event))
                continue
            if event["schema"] > SCHEMA:
                text = f"schema {event['schema']} needs a newer healcore"
                problems.append(LineProblem(number, text))
            events.append(event)
    return History(events, problems)


def parse(line: bytes) -> Event | str:
    """Returns the event in a line, or the reason why the line is not an event."""
    event = json_lines.parse(line)
    if isinstance(event, str):
        return event
    for name in ("schema", "seq"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {event.get(name)!r:.80}"
    for name in ("run", "kind"):
        if not isinstance(event.get(name), str):
            return f"{name} is not a string: {event.get(name)!r:.80}"
    return event
