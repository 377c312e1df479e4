"""Appends and reads lines of JSON, in a file that may have damaged lines.

Other processes may append to the same file or rotate it. A killed process may leave a torn line.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, TypeAlias

from healcore import console, regular_file
from healcore.core.decision import names_of

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
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else _shortened(str(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, str | os.PathLike):
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
    if isinstance(value, BaseException):
        return _shortened(f"{type(value).__name__}: {value}")
    return _shortened(repr(value))


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

    Reads at most one byte more than `MAX_LINE_BYTES` of a line, so that `parse` sees that the line
    is too long. A line that cannot be parsed and has no newline is reported as torn: its writer was
    killed, or is still writing the line.

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
