"""Opens text files, compressed or not, in several encodings; parses the numbers in their cells."""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from typing import Any, BinaryIO, TextIO, cast

from healcore import regular_file
from healcore.tools.traces.trace import TraceError

_UTF16 = (b"\xff\xfe", b"\xfe\xff")
BROKEN = (EOFError, zlib.error, OSError)
"""Errors in the middle of a file: a cut or damaged .gz, a disk that fails."""

_GZIP = b"\x1f\x8b"
_BAD_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
_HEAD = 1 << 20
_MOST_PACKED = 200
_FREE = 1 << 23
"""Bytes that may be unpacked for any size of the file."""
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Cells that mean that nothing was logged. "nan" is not one of them: it is a value."""


# -- files -----------------------------------------------------------------------------------------


def _open_bytes(path: str) -> BinaryIO:
    file = open(path, "rb", opener=regular_file.opener)  # noqa: SIM115 - handed to the caller
    if file.peek(2)[:2] == _GZIP:
        return cast(BinaryIO, io.BufferedReader(_Unpacked(file), 1 << 16))
    return file


class _Unpacked(io.RawIOBase):
    """The content of a .gz file, up to 8 MiB plus 200 times its size.

    deflate packs zeros a thousandfold, so that a megabyte could take a day to read. No log of some
    size shrinks to less than a 200th.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._packed = gzip.GzipFile(fileobj=file)
        self._room = _FREE + _MOST_PACKED * os.fstat(file.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._packed.readinto(buffer)
        self._room -= count
        if self._room < 0:
            raise zlib.error(f"they unpack to more than {_MOST_PACKED} times their size: no log")
        return count

    def close(self) -> None:
        self._packed.close()
        self._file.close()
        super().close()


def head(path: str) -> bytes:
    """The first megabyte of the content; less if the compressed data break before.

    Raises OSError, or TraceError if not even the first bytes can be decompressed.
    """
    start = b""
    with _open_bytes(path) as file:
        try:
            while len(start) < _HEAD and (block := file.read(1 << 14)):
                start += block
        except _BAD_GZIP as error:
            if not start:
                raise TraceError(f"its compressed data are damaged: {error}") from error
    return start


def is_compressed(path: str) -> bool:
    """Whether it is a .gz file, by content."""
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(2) == _GZIP


def encoding_of(start: bytes) -> str:
    """The encoding by the byte order mark."""
    return "utf-16" if start[:2] in _UTF16 else "utf-8-sig"


def open_text(path: str) -> TextIO:
    """The file as text, line ends unchanged. Bytes that are not text become U+FFFD."""
    with _open_bytes(path) as file:
        try:
            encoding = encoding_of(file.read(2))
        except _BAD_GZIP:
            encoding = encoding_of(b"")
    return io.TextIOWrapper(_open_bytes(path), encoding=encoding, errors="replace", newline="")


def skip_line(file: TextIO) -> None:
    """Reads to the end of a line without keeping it in memory."""
    while (text := file.readline(_HEAD)) and not text.endswith("\n"):
        pass


def why_broken(error: BaseException) -> str:
    """A message for an error of `BROKEN`."""
    if isinstance(error, _BAD_GZIP):
        return f"the compressed data end or break here ({error}): what follows is lost"
    return f"reading failed here ({error}): what follows is lost"


# -- numbers ---------------------------------------------------------------------------------------


def number_in_text(cell: str) -> float | None:
    """The number in a cell; None if nothing was logged; ValueError for other text."""
    try:
        if "_" not in cell:  # float() reads 1_000, which is Python syntax and not data
            return float(cell)
    except ValueError:
        pass
    if cell.strip().lower() in _NOT_LOGGED:
        return None
    raise ValueError(f"{excerpt(cell)} is not a number")


def number_in_json(value: Any) -> float | None:
    """The number in a JSON value; strings are read like cells. ValueError if it is not a number."""
    if value is None:
        return None
    if isinstance(value, str):
        return number_in_text(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{excerpt(str(value))} is not a number")


def excerpt(text: str) -> str:
    """A short quoted piece of a damaged file."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
