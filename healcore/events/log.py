"""Writes the events file, and reads its whole lines while other lines may be damaged.

A failing disk costs events, never the training.
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
from healcore.events import fork_safety, json_lines
from healcore.events.json_lines import MAX_LINE, LineAppender
from healcore.events.process import current_process, environment

SCHEMA = 2
"""Version of the format. Needed if fields change or go, not if fields are added."""

Event = dict[str, Any]


# A kill loses nothing: the line is in the kernel when `write` returns. A power cut loses what the
# kernel has not written yet (Linux: some 30 s). The log waits for the disk at these kinds only:
# alarms come many at a time.
_DURABLE = frozenset({"start", "incident", "rollback", "stop", "end"})


# -- writing --------------------------------------------------------------------------------------


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises. Lost events are counted in `lost`, reported in the field `lost` of the next
    event, and the first time by the logger `healcore`.

    Args:
        path: the events file, or None to write nothing.
        run: id of this process, or None for a new id.
        follow_links: as in `LineAppender`.

    Attributes:
        seq: number of the next event. Continues after the last event in the file.
        lost: number of events that could not be written.
        error: why the last event could not be written, or None.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        run: str | None = None,
        follow_links: bool = True,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.run = run or new_run()
        self.follow_links = follow_links
        self.seq = 0
        self.lost = 0
        self.error: str | None = None
        self._reported = 0
        self._out = None
        if self.path is not None:
            self._out = LineAppender(self.path, follow_links=follow_links)
        # Re-entrant: a signal handler may write while the code that it interrupted does.
        self._lock = threading.RLock()
        fork_safety.watch(self)
        if self.path is not None:
            self._renumber()

    def write(self, kind: str, *, step: int | None, **fields: Any) -> bool:
        """Appends one event. Returns whether the event is in the file.

        `kind` is one of `schema.KINDS`; `start` also gets the process and its environment. `step`
        is the index of the optimizer step, or None. Fields that are None are not written.
        """
        if self._out is None:
            return False
        with self._lock:
            seq = self.seq
            self.seq += 1  # first, so that an interrupting signal handler gets the next number
            try:
                line, lost = self._line(seq, kind, step, fields), self.lost
                self._out.append(line, durable=kind in _DURABLE)
                self._reported = lost
            except Exception as error:
                self._count_lost(error)
                return False
            self.error = None
            return True

    def forked(self) -> None:
        """Replaces the lock in a forked child: the thread that held it does not exist there."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Closes the file. A later `write` opens it again."""
        with self._lock:
            if self._out is not None:
                self._out.close()

    def _renumber(self) -> None:
        """Continues the numbers after the last event in the file."""
        with contextlib.suppress(Exception):  # an unreadable file may still be writable
            assert self.path is not None
            event = last(self.path) if self.path.is_file() else None
            if event is not None:
                self.seq = max(self.seq, event["seq"] + 1)

    def _line(self, seq: int, kind: str, step: int | None, fields: dict[str, Any]) -> bytes:
        known = {name: value for name, value in fields.items() if value is not None}
        if kind == "start":
            known = {**current_process()._asdict(), "environment": environment(), **known}
        if self.lost > self._reported:
            known["lost"] = self.lost - self._reported
        return json_lines.encode(
            {
                "schema": SCHEMA,
                "seq": seq,
                "run": self.run,
                "time": now(),
                "mono": round(time.monotonic(), 6),
                "kind": kind,
                "step": step,
                **known,
            }
        )

    def _count_lost(self, error: Exception) -> None:
        self.lost += 1
        self.error = f"{type(error).__name__}: {error}"
        if self.lost == 1:
            with contextlib.suppress(Exception):  # the user's own logging handlers
                console.warning(
                    f"events are being lost, training continues: {self.path} ({self.error})"
                )


def new_run() -> str:
    """A new run id: the time and a random part."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def now() -> str:
    """Wall time, ISO 8601, UTC, in microseconds."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


# -- reading --------------------------------------------------------------------------------------


class LineProblem(NamedTuple):
    """A damaged or unexpected line; `line` counts from 1."""

    line: int
    problem: str


class History(NamedTuple):
    """The events of a file in its order, and its bad lines."""

    events: list[Event]
    problems: list[LineProblem]

    def runs(self) -> dict[str, list[Event]]:
        """Run id -> its events by number, because clocks jump. Runs are in order of first event."""
        found: dict[str, list[Event]] = {}
        for event in self.events:
            found.setdefault(event["run"], []).append(event)
        return {run: sorted(events, key=lambda each: each["seq"]) for run, events in found.items()}


def read(path: str | os.PathLike[str]) -> History:
    """Reads a file, which may still be written. Raises OSError if it cannot be read.

    Damaged lines (torn by a kill, a full disk, a power cut) are skipped and listed, also an
    incomplete last line. The events take some 30 bytes of memory for each byte of the file.
    """
    events: list[Event] = []
    problems: list[LineProblem] = []
    seen: dict[tuple[str, int], int] = {}
    ended, warned = set[str](), set[str]()
    with open(path, "rb", opener=regular_file.opener) as file:
        for number, line in enumerate(json_lines.lines_of(file), start=1):
            if not line.strip():  # two writers ended the same torn line
                continue
            event = parse(line)
            if isinstance(event, str):
                torn = not line.endswith(b"\n")
                problems.append(LineProblem(number, f"torn: {event}" if torn else event))
                continue
            run, key = event["run"], (event["run"], event["seq"])
            if key in seen:
                text = f"a second event {key[1]} of run {run}, as in line {seen[key]}"
                problems.append(LineProblem(number, text))
            seen.setdefault(key, number)
            if event["schema"] > SCHEMA:
                text = f"schema {event['schema']} is of a newer healcore than this"
                problems.append(LineProblem(number, text))
            if events and (before := events[-1]["run"]) != run:
                ended.add(before)
                if run in ended and run not in warned:
                    warned |= {run, before}
                    problems.append(LineProblem(number, f"runs {before} and {run} write at once"))
            events.append(event)
    return History(events, problems)


def last(path: str | os.PathLike[str]) -> Event | None:
    """The last whole event of a file, or None. Reads from the end. May raise OSError."""
    parsed = map(parse, json_lines.lines_reversed(Path(path)))
    return next((event for event in parsed if not isinstance(event, str)), None)


def parse(line: bytes) -> Event | str:
    """The event in a line, or the reason why the line is not an event."""
    if len(line) > MAX_LINE:
        return f"longer than {MAX_LINE >> 20} MB, which no event is"
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({type(error).__name__}), {len(line)} bytes"
    if not isinstance(event, dict):
        return f"not a JSON object but {type(event).__name__}"
    for name in ("schema", "seq"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {event.get(name)!r:.80}"
    for name in ("run", "kind"):
        if not isinstance(event.get(name), str):
            return f"{name} is not a string: {event.get(name)!r:.80}"
    return event
