"""Text files as they come: compressed or not, with or without a byte order mark."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, TextIO, cast

from healcore.tools.traces.trace import TraceError

GZIP = b"\x1f\x8b"
HEAD = 1 << 20
UTF16 = (b"\xff\xfe", b"\xfe\xff")

# What reading a file can raise half-way: a cut or damaged .gz, a disk that fails.
BROKEN = (EOFError, zlib.error, OSError)


def open_bytes(path: str) -> BinaryIO:
    """The file's content, decompressed."""
    file = open(path, "rb")  # noqa: SIM115 - handed to the caller
    if file.peek(2)[:2] == GZIP:
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    return file


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
