"""Writes and reads the events file of a run, and names the files next to it."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from healcore.events.json_lines import (
    Event,
    append,
    parse_line,
    read_lines,
    safe_json,
    warn_of_loss,
)
from healcore.events.kinds import SCHEMA, Trait, has
from healcore.events.process import current_process, environment

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
"""Format of the field `time`: ISO 8601 in UTC, with microseconds."""


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises: a log that fails must not end a training run. Instead the logger `healcore`
    reports the first loss, and the field `lost` of the next event has the number of lost events.

    Args:
        path: the file, or None to write nothing. `write` returns its events then too.
        follow_links: as in `json_lines.append`.

    Attributes:
        process_id: field `run` of the events, from the start time and a random number.
        seq: number of the next event, from 0.
        lost: number of events that could not be written since the last one that could.

    Examples:
        >>> log = Log(None)
        >>> event = log.write("save", step=100)
        >>> event["seq"], event["kind"], event["step"]
        (0, 'save', 100)
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, follow_links: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.process_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.follow_links = follow_links
        self.seq = 0
        self.lost = 0
        # Re-entrant, because a signal handler may write while it interrupts a `write`.
        self._lock = threading.RLock()

    def write(self, kind: str, *, step: int | None, **fields: object) -> Event:
        """Appends one event.

        Args:
            kind: a key of `kinds.KINDS`. A `start` also gets the process and its environment.
            step: index of the optimizer step, or None for an event without a step.
            **fields: the further fields of `models.EventRecord`, of any type that `to_json` takes.
                Fields that are None are not written.

        Returns:
            The event as a reader of the file reads it: flags are lists of names, for example.
        """
        with self._lock:
            seq = self.seq
            self.seq += 1  # before writing: a signal handler may interrupt and needs its own number
            event, line = self._build(seq, kind, step, fields)
            if self.path is not None:
                durable = has(kind, Trait.DURABLE)
                try:
                    append(self.path, line, durable=durable, follow_links=self.follow_links)
                    self.lost = 0
                except Exception as error:
                    if not self.lost:
                        warn_of_loss("events", self.path, error)
                    self.lost += 1
            return event

    def _build(
        self, seq: int, kind: str, step: int | None, fields: dict[str, object]
    ) -> tuple[Event, bytes]:
        """Builds an event, and its line in ASCII.

        Both have the same values, so the caller of `write` sees what a reader of the file sees,
        without parsing the line again. ASCII, so that a torn line does not end inside a character.
        """
        values: dict[str, object] = {
            "schema": SCHEMA,
            "seq": seq,
            "run": self.process_id,
            "time": now(),
            "mono": round(time.monotonic(), 6),
            "kind": kind,
            "step": step,
        }
        if kind == "start":
            values |= current_process()._asdict()
            values["environment"] = environment()
        for name, value in fields.items():
            if value is not None:
                values[name] = value
        if self.lost:
            values["lost"] = self.lost
        # One by one, so that a value that cannot be converted loses no other value.
        event: Event = {name: safe_json(value) for name, value in values.items()}
        line = json.dumps(event, allow_nan=False, separators=(",", ":"))
        return event, f"{line}\n".encode("ascii")


def now() -> str:
    """The wall time in UTC, as ISO 8601 with microseconds."""
    return f"{datetime.now(UTC):{TIME_FORMAT}}"


# -- reading --------------------------------------------------------------------------------------


class LineProblem(NamedTuple):
    """A damaged or unexpected line. `line` counts from 1."""

    line: int
    problem: str


class EventsFile(NamedTuple):
    """What was read from an events file.

    Attributes:
        events: the events in file order. Several processes may have written them.
        problems: the damaged or unexpected lines, in file order.
    """

    events: list[Event]
    problems: list[LineProblem]

    def by_process(self) -> dict[str, list[Event]]:
        """Groups the events by the process that wrote them.

        Returns:
            Process id, the field `run` of an event -> events of the process. They are sorted by
            `seq`, because clocks may jump and a collector may have reordered the lines. A training
            run with restarts has several processes; `healcore.history.runs_of` joins them.
        """
        processes: dict[str, list[Event]] = {}
        for event in self.events:
            processes.setdefault(event["run"], []).append(event)
        for events in processes.values():
            events.sort(key=lambda event: event["seq"])
        return processes


def read(path: str | os.PathLike[str]) -> EventsFile:
    """Reads an events file, to which a process may still write.

        file = read("run.events.jsonl")
        for event in file.events:
            print(event["step"], event["kind"])

    Skips and lists damaged lines, such as an incomplete last line. Uses about 30 bytes of memory
    per byte of the file.

    Args:
        path: the file that `Log` wrote.

    Returns:
        The events, and the damaged or unexpected lines. An event of a newer schema is in both.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    file = EventsFile([], [])
    for number, event in read_lines(path, parse):
        if isinstance(event, str):
            file.problems.append(LineProblem(number, event))
            continue
        if event["schema"] > SCHEMA:
            text = f"schema {event['schema']} needs a newer healcore"
            file.problems.append(LineProblem(number, text))
        file.events.append(event)
    return file


def parse(line: bytes) -> Event | str:
    """Parses a line as an event.

    Args:
        line: the bytes of the line, with or without its newline.

    Returns:
        The event, in which `schema`, `seq`, `run` and `kind` have the right types, or the reason
        why the line is not an event. Other fields are not checked; see `models.validate`.
    """
    event = parse_line(line)
    if isinstance(event, str):
        return event
    for name in ("schema", "seq"):
        number = event.get(name)
        if type(number) is not int or not 0 <= number < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {number!r:.80}"
    for name in ("run", "kind"):
        text = event.get(name)
        if not isinstance(text, str):
            return f"{name} is not a string: {text!r:.80}"
    return event


# -- the files next to the events -----------------------------------------------------------------


def stem(path: Path) -> str:
    """The common part of the names of a run's files: `run` for `run.events.jsonl`."""
    return re.sub(r"(\.events|\.metrics)?\.jsonl?$", "", path.name)


def metrics_path(events: Path) -> Path:
    """The path of the metrics file that belongs to an events file."""
    return events.with_name(f"{stem(events)}.metrics.jsonl")


def process_path(events: str | os.PathLike[str], process: str, kind: str, suffix: str = "") -> Path:
    """The path of a file that one process of a run writes.

    Args:
        events: the events file, `run.events.jsonl`.
        process: id of the process, which another program may have chosen. Characters that do not
            belong into a file name are replaced.
        kind: what the file contains, such as "postmortem".
        suffix: end of the name, such as ".json".

    Returns:
        `run.<kind>.<process id><suffix>` in the same directory.
    """
    path = Path(events)
    safe_process = re.sub(r"[^\w.-]", "_", process)
    return path.with_name(f"{stem(path)}.{kind}.{safe_process}{suffix}")
