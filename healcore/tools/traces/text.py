"""Opens text files, compressed or not, in several encodings; parses the numbers in their cells."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, TextIO, cast

import numpy as np

from healcore import regular_file
from healcore.tools.traces.names import STEP
from healcore.tools.traces.trace import Findings, Rows, TraceError

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


def numbered_lines(
    path: str, file: TextIO, findings: Findings, *, longest: int, after: int = 0
) -> Iterator[tuple[int, str]]:
    """The lines after line `after`, with their numbers. Lines of `longest` characters are ignored.

    Reading ends at damage.
    """
    for number in itertools.count(after + 1):
        try:
            text = rest = file.readline(longest)
            too_long = len(text) == longest and not text.endswith("\n")
            while too_long and rest and not rest.endswith("\n"):
                rest = file.readline(_HEAD)
        except BROKEN as error:
            findings.problem(path, number, why_broken(error))
            return
        if not text:
            return
        if too_long:
            findings.problem(path, number, f"the line is longer than {longest >> 20} MB: left out")
        else:
            yield number, text


def why_broken(error: BaseException) -> str:
    """A message for an error of `BROKEN`."""
    if isinstance(error, _BAD_GZIP):
        return f"the compressed data end or break here ({error}): what follows is lost"
    return f"reading failed here ({error}): what follows is lost"


# -- numbers ---------------------------------------------------------------------------------------


def number_of(value: Any) -> float | None:
    """The number in a cell or a JSON value; None if nothing was logged; ValueError for others."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            if "_" not in value:  # float() reads 1_000, which is Python syntax and not data
                return float(value)
        except ValueError:
            pass
        if value.strip().lower() in _NOT_LOGGED:
            return None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{excerpt(str(value))} is not a number")


def excerpt(text: str) -> str:
    """A short quoted piece of a damaged file."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


# -- columns ---------------------------------------------------------------------------------------


def parsed_rows(
    path: str,
    cells: Mapping[str, Sequence[Any]],
    labels: Mapping[str, str],
    logs: np.ndarray,
    findings: Findings,
    *,
    line: Sequence[int],
    index: Sequence[int] | None = None,
) -> Rows:
    """Parses columns of cells; reports cells that are no numbers, and leaves out rows without step.

    Args:
        path: the file.
        cells: cells or JSON values (n,) of each signal and of the step, if the file has steps.
        labels: what messages call each column.
        logs: bool (n,): rows that are read.
        findings: where problems are reported.
        line: line of each row (n,).
        index: row numbers (n,), or None if rows are counted once merged.
    """
    columns = {
        name: _column(path, name, column, labels[name], logs, line, findings)
        for name, column in cells.items()
    }
    keep = logs & np.isfinite(columns[STEP][0]) if STEP in columns else logs
    signals = {name: column for name, column in columns.items() if name != STEP}
    with np.errstate(over="ignore"):  # 1e40 is an infinite float32, as it is in training
        values = {name: value[keep].astype(np.float32) for name, (value, _) in signals.items()}
    lines = np.asarray(line, np.int64)[keep]
    unknown = np.full(len(lines), -1)
    return Rows(
        index=unknown if index is None else np.asarray(index, np.int64)[keep],
        step=columns[STEP][0][keep] if STEP in columns else unknown * np.nan,
        values=values,
        given={name: given[keep] for name, (_, given) in signals.items()},
        line=lines,
        source=path,
    )


def _column(
    path: str,
    name: str,
    cells: Sequence[Any],
    label: str,
    logs: np.ndarray,
    lines: Sequence[int],
    findings: Findings,
) -> tuple[np.ndarray, np.ndarray]:
    """float64 (n,) numbers, and bool (n,): which of them were logged."""
    lost = "the row is left out" if name == STEP else f"the row is read without {name}"
    found, given = np.full(len(cells), np.nan), np.zeros(len(cells), bool)
    why: dict[int, object] = {}
    try:
        found[:], given[:] = _plain(cells)
    except (ValueError, OverflowError):
        for at in np.flatnonzero(logs).tolist():
            try:
                number = number_of(cells[at])
            except ValueError as error:
                why[at] = error
            else:
                given[at] = number is not None
                found[at] = np.nan if number is None else number
    if name == STEP:
        for at in np.flatnonzero(logs & ~np.isfinite(found)).tolist():
            why.setdefault(at, found[at] if given[at] else "missing")
    for at, reason in why.items():
        findings.problem(path, lines[at], f"{label}: {reason}: {lost}")
    return found, given


def _plain(cells: Sequence[Any]) -> tuple[list[float], list[bool]]:
    """A whole column of plain numbers, which is ten times as fast; ValueError for any other."""
    kinds = set(map(type, cells))
    if kinds == {str} and "_" not in "".join(cells):
        return [float(cell) if cell else np.nan for cell in cells], [cell != "" for cell in cells]
    if kinds <= {float, int, type(None)}:  # not bool: true is no loss
        given = [cell is not None for cell in cells]
        return [np.nan if cell is None else float(cell) for cell in cells], given
    raise ValueError
