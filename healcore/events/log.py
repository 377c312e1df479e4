"""Appends events and metrics as JSON lines, and reads a file that may have damaged lines.

Other processes may append to the same file or rotate it. A killed process may leave a torn line.
A disk failure loses lines but does not stop the training.
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
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

from healcore import console, regular_file
from healcore.core.decision import Cause, StepRecord, names
from healcore.events.process import current_process, environment
from healcore.events.schema import SCHEMA, Trait, has

MAX_LINE_BYTES = 1 << 24
"""Length limit of a line. Readers treat a longer line as damaged and do not buffer it."""

_BLOCK_BYTES = 1 << 16
_MAX_CHARACTERS = 10_000  # length limit of a string. Exception messages may contain whole tensors.

Event = dict[str, Any]
"""An event as JSON: name of the field -> value."""
JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"
"""A value that `json` can encode."""
ParseLine = Callable[[bytes], Event | str]
"""Parses a line into its object, or into the reason why the line has no object."""


_LINE_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
"""Encodes the lines of all steps. `json.dumps` with these options would make one for each line."""


# -- lines ----------------------------------------------------------------------------------------


def to_json(value: object) -> JsonValue:
    """Converts any value to types that `json` can encode.

    An event may hold whatever a program, a hook or an exception brings along, so no type is an
    error. Flags become lists of names, named tuples and dataclasses become objects, and sets become
    sorted lists. A 0-d array of NumPy, torch or JAX becomes its number. NaN and Inf become strings
    that `float` reads, because null means "unknown". Values of unknown types become strings too.

    Args:
        value: any value. An exception of its `item` or `__repr__` propagates.

    Returns:
        The JSON value. A string has at most 10,000 characters of the value's text.

    Examples:
        >>> to_json({"cause": Cause.LOSS_SPIKE, "loss": math.nan})
        {'cause': ['LOSS_SPIKE'], 'loss': 'nan'}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Flag):
        return [*names(value)]
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        number = float(value)
        if math.isfinite(number):
            return number
        return str(number)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        as_dict = getattr(value, "_asdict", None)
        if as_dict is not None:  # a named tuple
            return to_json(as_dict())
        return [to_json(item) for item in value]
    dataclass_fields = getattr(type(value), "__dataclass_fields__", None)
    if dataclass_fields is not None:
        return {name: to_json(getattr(value, name)) for name in dataclass_fields}
    if isinstance(value, Set):
        return sorted(map(to_json, value), key=repr)
    item = getattr(value, "item", None)
    if item is not None and getattr(value, "ndim", None) == 0:  # NumPy, torch, JAX
        return to_json(item())
    if isinstance(value, BaseException):
        return _shortened(f"{type(value).__name__}: {value}")
    if isinstance(value, str | os.PathLike):
        return _shortened(str(value))
    return _shortened(repr(value))


def _number(value: SupportsFloat) -> float | str:
    """`to_json` of a number of each step, which is known to be a number."""
    number = float(value)
    return number if math.isfinite(number) else str(number)


def _shortened(text: str) -> str:
    """The text, or its first 10,000 characters and its length."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text)} characters)"


def _encoded(value: object) -> tuple[JsonValue, str]:
    """The JSON value of a field, and its text. A value that cannot be encoded says so instead."""
    try:
        json_value = to_json(value)
        return json_value, json.dumps(json_value, allow_nan=False, separators=(",", ":"))
    # `item` and `__repr__` of a value are the user's code, which may raise any exception.
    except Exception as error:
        reason = f"(could not be written: {type(error).__name__})"
        return reason, json.dumps(reason)


def append(path: Path, lines: bytes, *, durable: bool = False, follow_links: bool = True) -> None:
    """Appends whole lines in one call, so that O_APPEND keeps them together.

    Opens the file for each call. So a file that another program rotates, or that a forked process
    inherits, needs no care. A killed process may have left a torn line at the end of the file; the
    new lines then begin with a newline, so that they are not lost with the torn line.

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
    optional_flags = ["O_CLOEXEC", "O_BINARY", "O_NONBLOCK"]  # not every system has each of them
    if not follow_links:
        optional_flags.append("O_NOFOLLOW")
    for name in optional_flags:
        flags |= getattr(os, name, 0)
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


def read_lines(path: str | os.PathLike[str], parse: ParseLine) -> Iterator[tuple[int, Event | str]]:
    """Reads a file line by line, and parses each line that is not empty.

    Longer lines than `MAX_LINE_BYTES` are cut to one byte more, so that `parse` sees that they are
    too long and the reader never holds more. A line that cannot be parsed and has no newline is
    reported as torn: its writer was killed, or is still writing it.

    Args:
        path: the file, to which a process may still write.
        parse: `parse_line`, or a function with further requirements, such as `parse`.

    Yields:
        The number of the line, from 1, and its object, or the reason why the line has no object.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            tail = line  # the last bytes that were read of this line
            if len(line) > MAX_LINE_BYTES:
                while tail and not tail.endswith(b"\n"):
                    tail = file.readline(_BLOCK_BYTES)
            if not line.strip():  # two writers may have added a newline to the same torn line
                continue
            parsed = parse(line)
            if isinstance(parsed, str) and not tail.endswith(b"\n"):
                parsed = f"torn: {parsed}"
            yield number, parsed


def read_last_lines(
    path: str | os.PathLike[str], parse: ParseLine, most: int = 1 << 20
) -> Iterator[Event]:
    """Reads the last lines of a file, which may be large, without reading the rest.

    Args:
        path: the file.
        parse: as in `read_lines`. Lines without an object are skipped.
        most: number of bytes at the end of the file that are read.

    Yields:
        The object of each line, oldest first.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        lines = file.read(most).split(b"\n")
    if start > 0:
        del lines[0]  # it may be incomplete
    for line in lines:
        if not line.strip():
            continue
        parsed = parse(line)
        if not isinstance(parsed, str):
            yield parsed


# -- writing --------------------------------------------------------------------------------------


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises: a log that fails must not end a training run. Instead the logger `healcore`
    reports the first loss, and the field `lost` of the next event has the number of lost events.

    Args:
        path: the file, or None to write nothing. `write` returns its events then too.
        follow_links: as in `append`.

    Attributes:
        run: id of this process in its events, from its start time and a random number.
        seq: number of the next event, from 0.
        lost: number of events that could not be written.

    Examples:
        >>> log = Log(None)
        >>> event = log.write("save", step=100)
        >>> event["seq"], event["kind"], event["step"]
        (0, 'save', 100)
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, follow_links: bool = True) -> None:
        self.path = None
        if path is not None:
            self.path = Path(path)
        self.run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.follow_links = follow_links
        self.seq = 0
        self.lost = 0
        self._reported = 0  # lost events that an event in the file has reported
        # Re-entrant, because a signal handler may write while it interrupts a `write`.
        self._lock = threading.RLock()

    def write(self, kind: str, *, step: int | None, **fields: object) -> Event:
        """Appends one event.

        Args:
            kind: a key of `schema.KINDS`. A `start` also gets the process and its environment.
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
            lost = self.lost
            if self.path is not None:
                durable = has(kind, Trait.DURABLE)
                try:
                    append(self.path, line, durable=durable, follow_links=self.follow_links)
                    self._reported = lost
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
            "run": self.run,
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
        if self.lost > self._reported:
            values["lost"] = self.lost - self._reported
        event: Event = {}
        pairs: list[str] = []
        for name, value in values.items():
            # Each value is encoded by itself, so that one that cannot be encoded loses no other.
            event[name], text = _encoded(value)
            pairs.append(f"{json.dumps(name)}:{text}")
        line = f"{{{','.join(pairs)}}}\n"
        return event, line.encode("ascii")


def warn_of_loss(what: str, path: Path, error: Exception) -> None:
    """Logs that lines cannot be written. Never raises.

    Args:
        what: the lines, "events" or "metrics".
        path: the file.
        error: the exception of the write.
    """
    why = f"{path} ({type(error).__name__}: {error})"
    with contextlib.suppress(Exception):  # from the user's logging handlers
        console.warning(f"{what} are being lost, training continues: {why}")


def now() -> str:
    """The wall time in UTC, as ISO 8601 with microseconds."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"


# -- reading --------------------------------------------------------------------------------------


class LineProblem(NamedTuple):
    """A damaged or unexpected line. `line` counts from 1."""

    line: int
    problem: str


class History(NamedTuple):
    """What was read from an events file.

    Attributes:
        events: the events in file order. Several processes may have written them.
        problems: the damaged or unexpected lines, in file order.
    """

    events: list[Event]
    problems: list[LineProblem]

    def runs(self) -> dict[str, list[Event]]:
        """Groups the events by the process that wrote them.

        Returns:
            The field `run` -> events of this process, sorted by `seq`, because clocks may jump and
            a collector may have reordered the lines. A training run with restarts has several
            processes; `healcore.history.runs_of` joins them.
        """
        runs: dict[str, list[Event]] = {}
        for event in self.events:
            runs.setdefault(event["run"], []).append(event)
        for events in runs.values():
            events.sort(key=lambda event: event["seq"])
        return runs


def read(path: str | os.PathLike[str]) -> History:
    """Reads an events file, to which a process may still write.

    Skips and lists damaged lines, such as an incomplete last line. Uses about 30 bytes of memory
    per byte of the file.

    Args:
        path: the file that `Log` wrote.

    Returns:
        The events, and the damaged or unexpected lines. An event of a newer schema is in both.

    Raises:
        OSError: the file cannot be read, or is not a regular file.

    Examples:
        >>> history = read("run.events.jsonl")
        >>> for event in history.events:
        ...     print(event["step"], event["kind"])
    """
    history = History([], [])
    for number, event in read_lines(path, parse):
        if isinstance(event, str):
            history.problems.append(LineProblem(number, event))
            continue
        if event["schema"] > SCHEMA:
            text = f"schema {event['schema']} needs a newer healcore"
            history.problems.append(LineProblem(number, text))
        history.events.append(event)
    return history


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


# -- metrics ---------------------------------------------------------------------------------------

_METRICS_SCHEMA = 1

NUMBERS = ("threshold", "z", "z_loss", "grad_scale", "lr_scale")
"""Fields of a `StepRecord` that every line has."""
COMPARED = ("loss_ratio", "eval_loss", "eval_gap")
"""Fields of a `StepRecord` that are None where they are unknown."""
_FLUSH_SECONDS = 0.5
"""Time for which lines are buffered, because a system call per step would be slow."""
_MAX_BUFFERED = 1000
_LINES_AT_ONCE = 64
"""Steps of one dispatch of which each has a line. A line takes longer than a small compiled step,
so that of more steps a thinned file has 32 to 64 lines per dispatch."""
_UNTHINNED = 50_000  # steps after which a thinned file doubles the number of steps per line


def stem(path: Path) -> str:
    """The common part of the names of a run's files: `run` for `run.events.jsonl`."""
    return re.sub(r"(\.events|\.metrics)?\.jsonl?$", "", path.name)


def metrics_path(events: Path) -> Path:
    """The path of the metrics file that belongs to an events file."""
    return events.with_name(f"{stem(events)}.metrics.jsonl")


@dataclass(eq=False)
class Metrics:
    """Appends a line per step and engine to the metrics file of a run.

    No method raises. After a rollback or a restart the file continues with a smaller `step`: the
    new lines replace the lines of the undone steps. Lines are buffered for half a second, because a
    system call per step would be slow; so a killed process loses up to half a second of lines.

    Attributes:
        lost: number of lines that could not be written.
    """

    path: Path | None
    """The file, or None to write nothing."""
    run: str
    """The id of this process, as in its events."""
    automatic: bool = False
    """Whether healcore has chosen the path. Then links are not followed, as in `append`, and
    the file is thinned: after 50,000 steps it has only every second step, after 100,000 every
    fourth, and so on, and all steps with an alarm. It has also fewer steps where one dispatch has
    64 or more. A line for several steps has the field `every`.
    The file grows by about 8 MB each time the run gets twice as long."""
    tracked: bool = False
    """Whether `write` returns the fields of every step, for the run's trackers."""

    def __post_init__(self) -> None:
        self.lost = 0
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._received: set[tuple[str, str]] = set()
        """(engine, signal) of each signal that the engine has received so far."""

    def write(
        self, step: int, record: StepRecord, *, several: bool, steps_at_once: int = 1
    ) -> dict[str, Any] | None:
        """Adds a line for a step of one engine.

        Args:
            step: index of the step in the run.
            record: the step as the engine judged it.
            several: whether the run has several engines. Then the line names the engine.
            steps_at_once: number of steps of the dispatch that the step belongs to.

        Returns:
            The fields of the line, without its head. None for a step without a line, unless
            `tracked`, and for a step that was not judged.
        """
        if self.path is None and not self.tracked:
            return None
        every = self._steps_per_line(step, record, steps_at_once)
        written = self.path is not None and step % every == 0
        if not record.judged or not (written or self.tracked):
            return None
        try:
            fields = self._fields(record, several)
            if written:
                self._lines.append(self._line(step, every, fields))
        except Exception:  # from converting a value of the driver; the training continues
            self.lost += 1
            fields = None
        if len(self._lines) >= _MAX_BUFFERED or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()
        return fields

    def flush(self) -> None:
        """Writes the buffered lines. Counts them in `lost` if they cannot be written."""
        self._flushed = time.monotonic()
        if self.path is None or not self._lines:
            return
        lines = self._lines
        self._lines = []
        try:
            append(self.path, "".join(lines).encode("ascii"), follow_links=not self.automatic)
        except Exception as error:
            if not self.lost:
                warn_of_loss("metrics", self.path, error)
            self.lost += len(lines)

    def _steps_per_line(self, step: int, record: StepRecord, steps_at_once: int) -> int:
        """The number of steps that a line represents, a power of two; 1 for an alarm."""
        if not self.automatic or record.cause:
            return 1
        doublings = (step // _UNTHINNED).bit_length()
        doublings += (steps_at_once // _LINES_AT_ONCE).bit_length()
        return 1 << doublings

    def _line(self, step: int, every: int, fields: dict[str, Any]) -> str:
        line: dict[str, Any] = {
            "schema": _METRICS_SCHEMA,
            "kind": "step",
            "run": self.run,
            "time": round(time.time(), 3),
            "step": step,
        }
        if every > 1:
            line["every"] = every
        line |= fields
        return _LINE_ENCODER.encode(line) + "\n"

    def _fields(self, record: StepRecord, several: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if several:
            fields["engine"] = record.engine
        self._add_signal(fields, record, "loss", Cause.NONFINITE_LOSS)
        self._add_signal(fields, record, "grad_norm", Cause.NONFINITE_GRAD)
        for name in (*NUMBERS, *COMPARED):
            value = getattr(record, name)
            if value is not None:
                fields[name] = _number(value)
        if record.lr is not None:
            fields["lr"] = _number(record.lr)
        fields["skip"] = record.skip
        fields["cause"] = names(record.cause)
        fields["action"] = names(record.action)
        return fields

    def _add_signal(
        self, fields: dict[str, Any], record: StepRecord, name: str, nonfinite: Cause
    ) -> None:
        """Adds the loss or norm of the step; "nan" replaces the last finite value.

        The engine starts with zeros, so a signal that has always been 0 is not received.
        """
        value = getattr(record, name)
        is_nonfinite = bool(record.cause and record.cause & nonfinite)
        signal = (record.engine, name)
        if value != 0 or is_nonfinite:
            self._received.add(signal)
        elif signal not in self._received:
            return
        if is_nonfinite:
            fields[name] = "nan"
        else:
            fields[name] = _number(value)
