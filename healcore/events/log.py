"""Writes and reads the events file of a run, and names the files next to it.

Lines of JSON in a file that may have damaged lines: other processes may append to the same file or
rotate it, and a killed process may leave a torn line.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from healcore import console, regular_file
from healcore.core.decision import names_of
from healcore.events.kinds import SCHEMA, Trait, has
from healcore.events.process import current_process, environment

MAX_LINE_BYTES = 1 << 24
"""Length limit of a line. Readers treat a longer line as damaged and do not buffer it."""
_BLOCK_BYTES = 1 << 16
_MAX_CHARACTERS = 10_000  # length limit of a string. Exception messages may contain whole tensors.

Event = dict[str, Any]
"""An event as JSON: name of the field -> value."""
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""A value that `json` can encode."""


# -- values ---------------------------------------------------------------------------------------


def to_json(value: object) -> JsonValue:
    """Converts any value to types that `json` can encode.

    An event may contain values of the program, of a hook or of an exception, so no type is an
    error. Flags become lists of names, named tuples and dataclasses become objects, and sets become
    lists. A 0-d array of NumPy, torch or JAX becomes its number. NaN and Inf become strings
    that `float` reads, because null means "unknown". Values of unknown types become strings too.

    Args:
        value: any value. An exception of its `item` or `__repr__` propagates.

    Returns:
        The JSON value. A string has at most 10,000 characters of the value's text.

    Examples:
        >>> import math
        >>> from healcore.core.decision import Cause
        >>> to_json({"cause": Cause.LOSS_SPIKE, "loss": math.nan})
        {'cause': ['LOSS_SPIKE'], 'loss': 'nan'}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Flag):
        return [*names_of(value)]
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, int) and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike | int):
        return _shortened(str(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    # A named tuple or a dataclass.
    fields = getattr(value, "_fields", getattr(type(value), "__dataclass_fields__", None))
    if fields is not None:
        return {name: to_json(getattr(value, name)) for name in fields}
    if isinstance(value, list | tuple | Set):
        return [to_json(item) for item in value]
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # NumPy, torch, JAX
        return to_json(item())
    is_error = isinstance(value, BaseException)
    return _shortened(f"{type(value).__name__}: {value}" if is_error else repr(value))


def _shortened(text: str) -> str:
    """The text, or its first 10,000 characters and its length."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text)} characters)"


def safe_json(value: object) -> JsonValue:
    """Converts the value of a field to JSON, like `to_json`.

    Returns:
        The JSON value. For a value that cannot be converted, a short text with the type of the
        exception.
    """
    try:
        return to_json(value)
    # `item` and `__repr__` of a value are the user's code, which may raise any exception.
    except Exception as error:
        return f"(could not be written: {type(error).__name__})"


# -- writing --------------------------------------------------------------------------------------


def append(path: Path, lines: bytes, *, durable: bool = False, follow_links: bool = True) -> None:
    """Appends whole lines in one call, so that O_APPEND keeps them together.

    Opens the file for each call, so another program may rotate the file, and a process may fork. A
    killed process may have left a torn line at the end of the file; the new lines then begin with a
    newline, so that they are not lost with the torn line.

    Args:
        path: the file. Its directory is created if it does not exist.
        lines: whole lines, each with its newline.
        durable: wait until the disk has the lines, so that a power cut does not lose them.
        follow_links: False for paths that healcore chose, because another user may have created a
            link there. The call then fails if the path is a link.

    Raises:
        OSError: the file cannot be opened or written, or the disk is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR and O_NONBLOCK: a pipe without a reader does not block.
    flags = os.O_APPEND | os.O_CREAT | os.O_RDWR
    for name in ("O_BINARY", "O_NONBLOCK", "" if follow_links else "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)  # not every system has each of them
    handle = os.open(path, flags, 0o666)
    try:
        if os.fstat(handle).st_size:  # 0 for a pipe too
            os.lseek(handle, -1, os.SEEK_END)  # O_APPEND ignores the position
            # A newline ends a torn line. Truncating the file could remove another writer's lines.
            if os.read(handle, 1) != b"\n":
                lines = b"\n" + lines
        written = os.write(handle, lines)
        if written < len(lines):  # the disk is full
            raise OSError(f"only {written} of {len(lines)} bytes could be written")
        if durable:
            with contextlib.suppress(OSError):  # a pipe or a terminal cannot be synced
                os.fsync(handle)
    finally:
        os.close(handle)


def warn_of_loss(what: str, path: Path, error: Exception) -> None:
    """Logs that lines cannot be written. Never raises.

    Args:
        what: the lines, "events" or "metrics".
        path: the file.
        error: the exception of the write.
    """
    why = f"{path} ({type(error).__name__}: {error})"
    with contextlib.suppress(Exception):  # the user's logging handlers may raise
        console.warning(f"{what} are being lost, training continues: {why}")


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises: a log that fails must not end a training run. Instead the logger `healcore`
    reports the first loss, and the field `lost` of the next event has the number of lost events.

    Args:
        path: the file, or None to write nothing. `write` returns its events then too.
        follow_links: as in `append`.

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
            if kind == "start":
                fields = {**current_process()._asdict(), "environment": environment(), **fields}
            values: dict[str, object] = {
                "schema": SCHEMA,
                "seq": seq,
                "run": self.process_id,
                "time": now(),
                "mono": round(time.monotonic(), 6),
                "kind": kind,
                "step": step,
                **{name: value for name, value in fields.items() if value is not None},
            }
            if self.lost:
                values["lost"] = self.lost
            # One by one, so that a value that cannot be converted loses no other value. The caller
            # sees what a reader of the file sees.
            event: Event = {name: safe_json(value) for name, value in values.items()}
            if self.path is not None:
                # ASCII, so that a torn line does not end inside a character.
                line = json.dumps(event, allow_nan=False, separators=(",", ":")) + "\n"
                durable, links = has(kind, Trait.DURABLE), self.follow_links
                try:
                    append(self.path, line.encode("ascii"), durable=durable, follow_links=links)
                    self.lost = 0
                except Exception as error:
                    if not self.lost:
                        warn_of_loss("events", self.path, error)
                    self.lost += 1
            return event


def now() -> str:
    """The wall time in UTC, as ISO 8601 with microseconds."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


# -- reading --------------------------------------------------------------------------------------


def parse_line(line: bytes) -> Event | str:
    """Parses a line as a JSON object.

    Args:
        line: the bytes of the line, with or without its newline.

    Returns:
        The object, or the reason why the line is not a JSON object, as text for a person.
    """
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES >> 20} MB, the limit of a line"
    try:
        parsed = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({type(error).__name__}), {len(line)} bytes"
    if not isinstance(parsed, dict):
        return f"not a JSON object but {type(parsed).__name__}"
    return parsed


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, Event | str]]:
    """Reads a file line by line, and parses each line that is not empty.

    A damaged line without a newline is reported as torn: its writer was killed, or is still writing
    the line.

    Args:
        path: the file, to which a process may still write.

    Yields:
        The number of the line, from 1, and its object, or the reason why the line has no object.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        for number in itertools.count(1):
            line = tail = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            while len(line) > MAX_LINE_BYTES and tail and not tail.endswith(b"\n"):
                tail = file.readline(_BLOCK_BYTES)
            if line.strip():  # two writers may have added a newline to the same torn line
                parsed = parse_line(line)
                if isinstance(parsed, str) and not tail.endswith(b"\n"):
                    parsed = f"torn: {parsed}"
                yield number, parsed


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
    for number, event in read_lines(path):
        problem = event if isinstance(event, str) else _problem_of(event)
        if problem:
            file.problems.append(LineProblem(number, problem))
        elif not isinstance(event, str):
            if event["schema"] > SCHEMA:
                text = f"schema {event['schema']} needs a newer healcore"
                file.problems.append(LineProblem(number, text))
            file.events.append(event)
    return file


def _problem_of(event: Event) -> str:
    """Why an object is no event, or an empty string. `models.validate` checks the other fields."""
    for name in ("schema", "seq"):
        number = event.get(name)
        if type(number) is not int or not 0 <= number < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {number!r:.80}"
    for name in ("run", "kind"):
        if not isinstance(event.get(name), str):
            return f"{name} is not a string: {event.get(name)!r:.80}"
    return ""


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
