"""Encodes Python values as JSON lines, appends whole lines to a file, and reads them.

Other processes may append to the same file or rotate it. A killed process may leave a torn line.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import os
import stat
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


class LineAppender:
    """Appends lines to a file, which `append` creates at first and after a rotation.

    Args:
        path: the file. Its directory is created too.
        follow_links: whether `path` may be a symbolic link. False for paths that healcore chose,
            because another user may have created the link.
    """

    def __init__(self, path: Path, *, follow_links: bool = True) -> None:
        self.path = path
        self._follow_links = follow_links
        self._handle: int | None = None

    def append(self, lines: bytes, *, durable: bool = False) -> None:
        """Appends whole lines in one call, so that O_APPEND keeps them together.

        With `durable`, waits until the disk has the lines. Raises OSError after a failed or partial
        write; the next call opens the file again.
        """
        try:
            handle, torn = self._open_current()
            # A newline ends a torn line. Truncating the file could remove another writer's lines.
            # A partial write is not continued, because the disk is full.
            data = b"\n" + lines if torn else lines
            written = os.write(handle, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            if durable:
                with contextlib.suppress(OSError):  # a pipe or a terminal cannot be synced
                    os.fsync(handle)
        except BaseException:
            self.close()  # the handle of a failed network disk stays stale
            raise

    def close(self) -> None:
        """Closes the file. A later `append` opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _open_current(self) -> tuple[int, bool]:
        """Opens the file if needed. Returns its descriptor, and whether its last line is torn."""
        current = self._stat()
        if self._handle is not None and (
            current is None or not os.path.samestat(current, os.fstat(self._handle))
        ):
            self.close()
        if self._handle is None:
            self._handle = self._open(regular=current is None or stat.S_ISREG(current.st_mode))
        if not os.fstat(self._handle).st_size:  # an empty file, or a pipe
            return self._handle, False
        os.lseek(self._handle, -1, os.SEEK_END)  # O_APPEND ignores the position
        return self._handle, os.read(self._handle, 1) != b"\n"

    def _open(self, *, regular: bool) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        # O_WRONLY: with O_RDWR, this process would become a reader of the pipe.
        # O_NONBLOCK: a pipe without a reader must not block.
        flags |= os.O_RDWR if regular else os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
        flags |= 0 if self._follow_links else getattr(os, "O_NOFOLLOW", 0)
        return os.open(self.path, flags, 0o666)

    def _stat(self) -> os.stat_result | None:
        try:
            return self.path.stat(follow_symlinks=self._follow_links)
        except OSError:
            return None


# -- reading --------------------------------------------------------------------------------------


def iter_lines(file: BinaryIO) -> Iterator[bytes]:
    """Iterates over the lines of a file, each cut to `MAX_LINE_BYTES` + 1 bytes."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(_BLOCK_BYTES)
            line = line[:-1] + b"\n" if rest else line
        yield line
