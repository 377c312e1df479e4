"""Encodes any Python value as a JSON line, appends whole lines to a file, and reads them back.

Other processes may write to the same file, rotate it, or have left a torn line in it.
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

from healcore import regular_file

MAX_LINE = 1 << 24
"""Bytes. A longer line is damage and is not held in memory."""

_BLOCK = 1 << 16
_MAX_TEXT = 10_000
"""Characters of a text. Messages of exceptions may contain whole tensors."""


# -- values ---------------------------------------------------------------------------------------


def encode(fields: Mapping[str, Any]) -> bytes:
    """One line with its newline. ASCII, so that a torn line is not cut inside a character.

    A field that cannot be encoded becomes a text about the error.
    """
    pairs = (f"{json.dumps(str(name))}:{_encoded(value)}" for name, value in fields.items())
    return f"{{{','.join(pairs)}}}\n".encode("ascii")


def _encoded(value: Any) -> str:
    try:
        return json.dumps(to_json(value), allow_nan=False, separators=(",", ":"))
    # Any exception: `item` and `__repr__` of a value are the user's code.
    except Exception as error:
        return json.dumps(f"(could not be written: {type(error).__name__})")


def to_json(value: Any) -> Any:
    """Converts a value to one that `json` can write.

    Flags become their names, NamedTuples and dataclasses objects with the names of their fields,
    arrays without dimensions numbers. Other types that JSON does not have become text. So do
    numbers that it does not have, in a form that `float` takes: "nan", "inf", "-inf". null would
    mean "not known".
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, enum.Flag):
        return [each.name for each in type(value) if each.name and each in value]
    if isinstance(value, enum.Enum):
        return to_json(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        named = getattr(value, "_asdict", None)
        return [to_json(each) for each in value] if named is None else to_json(named())
    if (fields := getattr(type(value), "__dataclass_fields__", None)) is not None:
        return {name: to_json(getattr(value, name)) for name in fields}
    if isinstance(value, Set):
        return sorted((to_json(each) for each in value), key=repr)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # NumPy, torch, JAX
        return to_json(value.item())
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    else:
        text = str(value) if isinstance(value, str | os.PathLike) else repr(value)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


# -- writing --------------------------------------------------------------------------------------


class LineAppender:
    """Appends to one file, which is opened at the first line and again after a rotation.

    Creates the directory. `follow_links` is for a path that the user named. A path that healcore
    chose is not written through a link, because another user may have created the link.
    """

    def __init__(self, path: Path, *, follow_links: bool = True) -> None:
        self.path = path
        self._follow_links = follow_links
        self._handle: int | None = None

    def append(self, lines: bytes, *, durable: bool = False) -> None:
        """Adds whole lines in one call: with O_APPEND no other line comes in between.

        Raises OSError if not all could be written; the next call opens the file again.
        """
        try:
            handle, torn = self._open_current()
            # A line feed ends a torn line. Truncating the torn line could remove lines of another
            # writer. The rest of a short write is not tried again: the disk is full.
            data = b"\n" + lines if torn else lines
            written = os.write(handle, data)
            if written < len(data):
                raise OSError(f"only {written} of {len(data)} bytes could be written")
            if durable:
                with contextlib.suppress(OSError):  # a pipe or a terminal cannot be synced
                    os.fsync(handle)
        except BaseException:
            self.close()  # after a failure of a network disk the handle stays stale
            raise

    def close(self) -> None:
        """Closes the file. A later `append` opens it again."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with contextlib.suppress(OSError):
                os.close(handle)

    def _open_current(self) -> tuple[int, bool]:
        """Returns a handle of the file at the path, and whether its last line is torn."""
        current = self._stat()
        if self._handle is not None and (
            current is None or not os.path.samestat(current, os.fstat(self._handle))
        ):
            self.close()
        if self._handle is None:
            self._handle = self._open(regular=current is None or stat.S_ISREG(current.st_mode))
        if not os.fstat(self._handle).st_size:  # also a pipe
            return self._handle, False
        os.lseek(self._handle, -1, os.SEEK_END)  # does not change where O_APPEND writes
        return self._handle, os.read(self._handle, 1) != b"\n"

    def _open(self, *, regular: bool) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        # A pipe without a reader must not block. Opening it for reading would make one.
        flags |= os.O_RDWR if regular else os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
        flags |= 0 if self._follow_links else getattr(os, "O_NOFOLLOW", 0)
        return os.open(self.path, flags, 0o666)

    def _stat(self) -> os.stat_result | None:
        try:
            return self.path.stat(follow_symlinks=self._follow_links)
        except OSError:
            return None


# -- reading --------------------------------------------------------------------------------------


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. A line above `MAX_LINE` is cut to `MAX_LINE` + 1 bytes."""
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            end = line
            while end and not end.endswith(b"\n"):
                end = file.readline(_BLOCK)
            line = line[:-1] + b"\n" if end else line
        yield line


def first_line(path: Path) -> bytes | None:
    """The first line that is not blank, or None. May raise OSError."""
    with open(path, "rb", opener=regular_file.opener) as file:
        return next((line for line in lines_of(file) if line.strip()), None)


def lines_reversed(path: Path) -> Iterator[bytes]:
    """The lines of a file from last to first, read in blocks, without those over `MAX_LINE`."""
    with open(path, "rb", opener=regular_file.opener) as file:
        place, rest, size = file.seek(0, os.SEEK_END), b"", _BLOCK
        too_long = False  # inside a line above MAX_LINE
        while place > 0:
            size = min(size, place)
            place -= size
            file.seek(place)
            rest, *whole = (file.read(size) + (b"" if too_long else rest)).split(b"\n")
            yield from reversed(whole[:-1] if too_long and whole else whole)
            too_long = (too_long and not whole) or len(rest) > MAX_LINE
            # Doubled, so that a line of many blocks is not split again and again.
            size = _BLOCK if whole or too_long else 2 * size
        if not too_long:
            yield rest
