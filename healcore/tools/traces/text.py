"""Text files as they come: compressed or not, with or without a byte order mark."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from typing import Any, BinaryIO, TextIO, cast

from healcore.tools.traces.trace import TraceError

GZIP = b"\x1f\x8b"
HEAD = 1 << 20
_MOST_PACKED = 200
_FREE = 1 << 23
"""Bytes that may be unpacked from however few."""
UTF16 = (b"\xff\xfe", b"\xfe\xff")

# What reading a file can raise half-way: a cut or damaged .gz, a disk that fails.
BROKEN = (EOFError, zlib.error, OSError)


def open_bytes(path: str) -> BinaryIO:
    """The file's content, decompressed."""
    file = open(path, "rb")  # noqa: SIM115 - handed to the caller
    if file.peek(2)[:2] == GZIP:
        return cast(BinaryIO, io.BufferedReader(_Unpacked(file), 1 << 16))
    return file


class _Unpacked(io.RawIOBase):
    """The content of a .gz file, as far as it is some log's.

    deflate packs zeros a thousandfold, and a megabyte would be a day of reading. No log shrinks
    to a part in 200, once there is enough of it to say so.
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

    Raises:
        OSError: it cannot be opened.
        TraceError: not even its first bytes can be decompressed.
    """
    start = b""
    with open_bytes(path) as file:
        try:
            while len(start) < HEAD and (block := file.read(1 << 14)):
                start += block
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if not start:
                raise TraceError(f"its compressed data are damaged: {error}") from error
    return start


def is_compressed(path: str) -> bool:
    """Whether it is a .gz file, whatever it is called."""
    with open(path, "rb") as file:
        return file.read(2) == GZIP


def open_text(path: str) -> TextIO:
    """The file as text, line ends as they are. Bytes that are not text become U+FFFD."""
    mark = _mark(path)
    encoding = "utf-16" if mark in UTF16 else "utf-8-sig"
    return io.TextIOWrapper(open_bytes(path), encoding=encoding, errors="replace", newline="")


def _mark(path: str) -> bytes:
    """The first two bytes of the content, in which a byte order mark would be."""
    with open_bytes(path) as file:
        try:
            return file.read(2)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            return b""


def why_broken(error: BaseException) -> str:
    """What `BROKEN` errors mean to the reader of the message."""
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return f"the compressed data end or break here ({error}): what follows is lost"
    return f"reading failed here ({error}): what follows is lost"
