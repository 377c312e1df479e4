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
from typing import Any, NamedTuple

from healcore import console, regular_file
from healcore.core.decision import Cause, StepRecord, names
from healcore.events.process import current_process, environment
from healcore.events.schema import SCHEMA, Trait, has

MAX_LINE_BYTES = 1 << 24
"""Length limit of a line. Readers treat a longer line as damaged and do not buffer it."""

_BLOCK_BYTES = 1 << 16
_MAX_CHARACTERS = 10_000  # length limit of a string. Exception messages may contain whole tensors.
Event = dict[str, Any]


# -- lines ----------------------------------------------------------------------------------------


def to_json(value: Any) -> Any:
    """Converts any value to types that `json` can encode.

    Flags become lists of names. NaN and Inf become strings that `float` reads, because null means
    "unknown". Values of unknown types become strings too.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Flag):
        return [flag.name for flag in type(value) if flag.name and flag in value]
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        as_dict = getattr(value, "_asdict", None)
        return [to_json(item) for item in value] if as_dict is None else to_json(as_dict())
    if (fields := getattr(type(value), "__dataclass_fields__", None)) is not None:
        return {name: to_json(getattr(value, name)) for name in fields}
    if isinstance(value, Set):
        return sorted((to_json(item) for item in value), key=repr)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # NumPy, torch, JAX
        return to_json(value.item())
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    else:
        text = str(value) if isinstance(value, str | os.PathLike) else repr(value)
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]} ... ({len(text)} characters)"


def _encode_value(value: Any) -> str:
    try:
        return json.dumps(to_json(value), allow_nan=False, separators=(",", ":"))
    # `item` and `__repr__` of a value are the user's code, which may raise any exception.
    except Exception as error:
        return json.dumps(f"(could not be written: {type(error).__name__})")


def append(path: Path, lines: bytes, *, durable: bool = False, follow_links: bool = True) -> None:
    """Appends whole lines in one call, so that O_APPEND keeps them together. Raises OSError.

    Opens the file for each call, so a rotated or forked file needs no care. Creates the directory.
    With `durable` it waits until the disk has the lines. `follow_links` is False for paths that
    healcore chose, because another user may have created a link there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR and O_NONBLOCK: a pipe without a reader does not block.
    flags = os.O_APPEND | os.O_CREAT | os.O_RDWR
    for name in ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK", "" if follow_links else "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    handle = os.open(path, flags, 0o666)
    try:
        if os.fstat(handle).st_size:  # 0 for a pipe too
            os.lseek(handle, -1, os.SEEK_END)  # O_APPEND ignores the position
            # A newline ends a torn line. Truncating the file could remove another writer's lines.
            lines = lines if os.read(handle, 1) == b"\n" else b"\n" + lines
        written = os.write(handle, lines)
        if written < len(lines):  # the disk is full
            raise OSError(f"only {written} of {len(lines)} bytes could be written")
        if durable:
            with contextlib.suppress(OSError):  # a pipe or a terminal cannot be synced
                os.fsync(handle)
    finally:
        os.close(handle)


def parse_line(line: bytes) -> Event | str:
    """The JSON object in a line, or the reason why the line is no JSON object."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES >> 20} MB, the limit of a line"
    try:
        parsed = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({type(error).__name__}), {len(line)} bytes"
    return parsed if isinstance(parsed, dict) else f"not a JSON object but {type(parsed).__name__}"


def read_lines(
    path: str | os.PathLike[str], parse: Callable[[bytes], Event | str]
) -> Iterator[tuple[int, Event | str]]:
    """Yields the number of each line, from 1, and its object or the reason why it has none.

    Cuts lines to `MAX_LINE_BYTES` + 1 bytes. Raises OSError.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        for number in itertools.count(1):
            line = rest = file.readline(MAX_LINE_BYTES + 1)
            while len(line) > MAX_LINE_BYTES and rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK_BYTES)
            if not line:
                return
            if line.strip():  # two writers may have added a newline to the same torn line
                found = parse(line)
                torn = isinstance(found, str) and not rest.endswith(b"\n")
                yield number, f"torn: {found}" if torn else found


def read_last_lines(
    path: str | os.PathLike[str], parse: Callable[[bytes], Event | str], most: int = 1 << 20
) -> Iterator[Event]:
    """Yields the objects of the last lines, oldest first, within the last `most` bytes of a file.

    Skips damaged lines. Raises OSError.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        lines = file.read(most).split(b"\n")
    for line in lines[bool(start) :]:  # the first line may be incomplete
        if line.strip() and not isinstance(found := parse(line), str):
            yield found


# -- writing --------------------------------------------------------------------------------------


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises. The field `lost` of the next event has the number of lost events. The logger
    `healcore` reports the first loss. Without a `path` the log writes nothing. `run` is the id of
    this process, `seq` the number of the next event, from 0.
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, follow_links: bool = True) -> None:
        self.path = None if path is None else Path(path)
        self.run = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.follow_links = follow_links
        self.seq = self.lost = self._reported = 0
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
            line = self._line(seq, kind, step, fields)
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
            return json.loads(line)

    def _line(self, seq: int, kind: str, step: int | None, fields: dict[str, Any]) -> bytes:
        """The event as a line in ASCII, so that a torn line does not end inside a character."""
        fields = {name: value for name, value in fields.items() if value is not None}
        if kind == "start":
            fields = {**current_process()._asdict(), "environment": environment(), **fields}
        if self.lost > self._reported:
            fields["lost"] = self.lost - self._reported
        head = {"schema": SCHEMA, "seq": seq, "run": self.run, "time": now()}
        head |= {"mono": round(time.monotonic(), 6), "kind": kind, "step": step}
        fields = head | fields
        pairs = (f"{json.dumps(name)}:{_encode_value(value)}" for name, value in fields.items())
        return f"{{{','.join(pairs)}}}\n".encode("ascii")


def warn_of_loss(what: str, path: Path, error: Exception) -> None:
    """Logs that events or metrics cannot be written. Never raises."""
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
    """The events of a file in file order, and its damaged or unexpected lines."""

    events: list[Event]
    problems: list[LineProblem]

    def runs(self) -> dict[str, list[Event]]:
        """Run id -> events, sorted by `seq` because clocks may jump."""
        runs: dict[str, list[Event]] = {}
        for event in self.events:
            runs.setdefault(event["run"], []).append(event)
        return {run: sorted(events, key=lambda event: event["seq"]) for run, events in runs.items()}


def read(path: str | os.PathLike[str]) -> History:
    """Reads an events file, to which a process may still write. Raises OSError.

    Skips and lists damaged lines, such as an incomplete last line. Uses about 30 bytes of memory
    per byte of the file.
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
    """The event in a line, or the reason why the line is not an event."""
    event = parse_line(line)
    if isinstance(event, str):
        return event
    for name in ("schema", "seq"):
        if type(event.get(name)) is not int or not 0 <= event[name] < 1 << 53:
            return f"{name} is not a whole number from 0 to 2^53: {event.get(name)!r:.80}"
    wrong = [name for name in ("run", "kind") if not isinstance(event.get(name), str)]
    return f"{wrong[0]} is not a string: {event.get(wrong[0])!r:.80}" if wrong else event


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
    """Appends a line per step and engine. No method raises.

    After a rollback or a restart the file continues with a smaller `step`: the new lines replace
    the lines of the undone steps. A killed process loses up to half a second of lines.
    """

    path: Path | None  # the file, or None to write nothing
    run: str  # the run's id, as in its events
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
        self._logged: set[tuple[str, str]] = set()  # engine and received signal

    def write(
        self, step: int, record: StepRecord, *, several: bool, steps_at_once: int = 1
    ) -> dict[str, Any] | None:
        """Adds a line for a step of one engine, with its name if the run has `several` engines.

        `steps_at_once` is the number of steps of its dispatch.

        Returns the fields of the line, or None for a step without a line, unless `tracked`.
        """
        every = 1
        if self.automatic and not record.cause:
            every <<= (step // _UNTHINNED).bit_length()
            every <<= (steps_at_once // _LINES_AT_ONCE).bit_length()
        written = self.path is not None and step % every == 0
        if not record.judged or not (written or self.tracked):
            return None
        try:
            fields = self._fields(record, several)
            if written:
                head = {"schema": _METRICS_SCHEMA, "kind": "step", "run": self.run}
                head |= {"time": round(time.time(), 3), "step": step}
                line = head | ({"every": every} if every > 1 else {}) | fields
                self._lines.append(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        except Exception:  # from converting a value of the driver; the training continues
            self.lost += 1
            fields = None
        if len(self._lines) >= _MAX_BUFFERED or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()
        return fields

    def flush(self) -> None:
        """Writes the buffered lines."""
        self._flushed = time.monotonic()
        if self.path is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            append(self.path, "".join(lines).encode("ascii"), follow_links=not self.automatic)
        except Exception as error:
            if not self.lost:
                warn_of_loss("metrics", self.path, error)
            self.lost += len(lines)

    def _fields(self, record: StepRecord, several: bool) -> dict[str, Any]:
        fields = {"engine": record.engine} if several else {}
        fields |= self._signals(record)
        numbers = {name: getattr(record, name) for name in (*NUMBERS, *COMPARED)}
        numbers["lr"] = None if record.lr in (0.0, 1.0) else record.lr
        fields |= {n: to_json(float(v)) for n, v in numbers.items() if v is not None}
        flags = {"cause": names(record.cause), "action": names(record.action)}
        return fields | {"skip": record.skip, **flags}

    def _signals(self, record: StepRecord) -> dict[str, Any]:
        """The loss and norm of the step; "nan" replaces the last finite value.

        The engine starts with zeros, so a signal that has always been 0 is not received.
        """
        signals: dict[str, Any] = {}
        for name, value, nonfinite in (
            ("loss", record.loss, Cause.NONFINITE_LOSS),
            ("grad_norm", record.grad_norm, Cause.NONFINITE_GRAD),
        ):
            if value != 0 or record.cause & nonfinite:
                self._logged.add((record.engine, name))
            if (record.engine, name) in self._logged:
                signals[name] = "nan" if record.cause & nonfinite else to_json(float(value))
        return signals
