"""Encodes Python values as JSON lines, appends whole lines to a file, and reads them.

Other processes may append to the same file or rotate it. A killed process may leave a torn line.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 1 << 24
"""Length limit of a line. Readers treat a longer line as damaged and do not buffer it."""

_BLOCK_BYTES = 1 << 16
_MAX_CHARACTERS = 10_000
"""Length limit of a string. Exception messages may contain whole tensors."""


# -- values ---------------------------------------------------------------------------------------


def encode(fields: Mapping[str, Any]) -> bytes:
    """Returns a JSON object with a final newline.

    The line is ASCII, so that a torn line does not end inside a character. If a field cannot be
    encoded, the line has a string with the type of the error instead.
    """
    pairs = (f"{json.dumps(str(name))}:{_encode_value(value)}" for name, value in fields.items())
    return f"{{{','.join(pairs)}}}\n".encode("ascii")


def _encode_value(value: Any) -> str:
    try:
        return json.dumps(to_json(value), allow_nan=False, separators=(",", ":"))
    # `item` and `__repr__` of a value are the user's code, which may raise any exception.
    except Exception as error:
        return json.dumps(f"(could not be written: {type(error).__name__})")


def to_json(value: Any) -> Any:
    """Converts a value to types that `json` can encode.

    Flags become lists of names, NamedTuples and dataclasses become objects, and 0-d arrays become
    numbers. NaN and Inf become strings that `float` reads, because null means "unknown". Values of
    other types become strings too.
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


# -- writing --------------------------------------------------------------------------------------


def append(path: Path, lines: bytes, *, durable: bool = False, follow_links: bool = True) -> None:
    """Appends whole lines in one call, so that O_APPEND keeps them together.

    Opens the file for each call, so a rotated or forked file needs no care.

    Args:
        path: the file. It is created with its directory.
        lines: whole lines.
        durable: whether to wait until the disk has the lines.
        follow_links: whether `path` may be a symbolic link. False for paths that healcore chose,
            because another user may have created the link.

    Raises:
        OSError: the lines could not be written, or only in part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_RDWR and O_NONBLOCK: a pipe without a reader does not block.
    names = ("O_CLOEXEC", "O_BINARY", "O_NONBLOCK", *(() if follow_links else ("O_NOFOLLOW",)))
    flags = os.O_APPEND | os.O_CREAT | os.O_RDWR
    for name in names:
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


# -- reading --------------------------------------------------------------------------------------


def parse(line: bytes) -> dict[str, Any] | str:
    """Returns the JSON object in a line, or the reason why the line has none."""
    if len(line) > MAX_LINE_BYTES:
        return f"longer than {MAX_LINE_BYTES >> 20} MB, the limit of a line"
    try:
        parsed = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return f"not JSON ({type(error).__name__}), {len(line)} bytes"
    return parsed if isinstance(parsed, dict) else f"not a JSON object but {type(parsed).__name__}"


def iter_lines(file: BinaryIO) -> Iterator[bytes]:
    """Iterates over the lines of a file, each cut to `MAX_LINE_BYTES` + 1 bytes."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK_BYTES)
            line = line[:-1] + b"\n" if rest else line
        yield line
