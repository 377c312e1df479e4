"""Opens text files, compressed or not, in several encodings, and parses their numbers."""

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
READ_ERRORS = (EOFError, zlib.error, OSError)
"""Errors in the middle of a file: a truncated or damaged .gz, or a failing disk."""

_GZIP = b"\x1f\x8b"
_BAD_GZIP = (EOFError, zlib.error, gzip.BadGzipFile)
_HEAD_BYTES = 1 << 20
_MAX_UNPACKED_RATIO = 50
_MIN_UNPACKED = 1 << 20
"""Bytes that may be unpacked from a file of any size."""
_LINE_COST = 16
"""A line counts as this many bytes more, because a row takes longer than its text."""
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""


# -- files -----------------------------------------------------------------------------------------


def _open_bytes(path: str) -> BinaryIO:
    file = open(path, "rb", opener=regular_file.opener)  # noqa: SIM115 - returned
    if file.peek(2)[:2] == _GZIP:
        return cast(BinaryIO, io.BufferedReader(_Unpacked(file), 1 << 16))
    return file


class _Unpacked(io.RawIOBase):
    """The content of a .gz file, up to 1 MiB plus 50 times the size of the file.

    The limit is one on the time of a reader: deflate compresses repeated rows by a factor of 1000,
    and a million rows take a minute. Rows whose numbers differ compress by a factor of 5 to 20.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._gzip = gzip.GzipFile(fileobj=file)
        self._room = _MIN_UNPACKED + _MAX_UNPACKED_RATIO * os.fstat(file.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._gzip.readinto(buffer)
        content = bytes(buffer[:count])
        self._room -= count + _LINE_COST * (content.count(b"\n") + content.count(b"\r"))
        if self._room < 0:
            limit = f"{_MIN_UNPACKED >> 20} MiB plus {_MAX_UNPACKED_RATIO} times their size"
            raise zlib.error(
                f"they unpack to more rows than {limit} allows: pass the unpacked file"
            )
        return count

    def close(self) -> None:
        self._gzip.close()
        self._file.close()
        super().close()


def read_head(path: str) -> bytes:
    """Returns the first megabyte of the content, or less if the compressed data are damaged.

    Raises OSError, or TraceError if the first bytes cannot be decompressed.
    """
    start = b""
    with _open_bytes(path) as file:
        try:
            while len(start) < _HEAD_BYTES and (block := file.read(1 << 14)):
                start += block
        except _BAD_GZIP as error:
            if not start:
                raise TraceError(f"its compressed data are damaged: {error}") from error
    return start


def is_compressed(path: str) -> bool:
    """Whether the content of a file is compressed with gzip."""
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(2) == _GZIP


def detect_encoding(start: bytes) -> str:
    """Returns the encoding by the byte order mark."""
    return "utf-16" if start[:2] in _UTF16 else "utf-8-sig"


def open_text(path: str) -> TextIO:
    """Opens a file as text, with unchanged line ends. Invalid bytes become U+FFFD."""
    with _open_bytes(path) as file:
        try:
            encoding = detect_encoding(file.read(2))
        except _BAD_GZIP:
            encoding = detect_encoding(b"")
    return io.TextIOWrapper(_open_bytes(path), encoding=encoding, errors="replace", newline="")


def numbered_lines(
    path: str, file: TextIO, findings: Findings, *, longest: int, after: int = 0
) -> Iterator[tuple[int, str]]:
    """Yields number and text of the lines after line `after`, up to damage.

    Lines of `longest` or more characters are skipped.
    """
    for number in itertools.count(after + 1):
        try:
            text = rest = file.readline(longest)
            too_long = len(text) == longest and not text.endswith("\n")
            while too_long and rest and not rest.endswith("\n"):
                rest = file.readline(_HEAD_BYTES)
        except READ_ERRORS as error:
            findings.problem(path, number, describe_damage(error))
            return
        if not text:
            return
        if too_long:
            findings.problem(path, number, f"the line is longer than {longest >> 20} MB: skipped")
        else:
            yield number, text


def describe_damage(error: BaseException) -> str:
    """Returns a message for an error of `READ_ERRORS`."""
    if isinstance(error, _BAD_GZIP):
        return f"the compressed data end or are damaged here ({error}): the rest is lost"
    return f"reading failed here ({error}): the rest is lost"


# -- numbers ---------------------------------------------------------------------------------------


def parse_number(value: Any) -> float | None:
    """Parses a cell or JSON value; returns None for no value. Raises ValueError for other text."""
    if value is None:
        return None
    if isinstance(value, str):
        try:
            if "_" not in value:  # float() would accept 1_000, which is Python syntax
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
    raise ValueError(f"{quote_excerpt(str(value))} is not a number")


def quote_excerpt(text: str) -> str:
    """Quotes the start of a damaged text."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


# -- columns ---------------------------------------------------------------------------------------


def parse_rows(
    path: str,
    cells: Mapping[str, Sequence[Any]],
    labels: Mapping[str, str],
    is_row: np.ndarray,
    findings: Findings,
    *,
    line: Sequence[int],
    index: Sequence[int] | None = None,
) -> Rows:
    """Parses columns of cells. Reports cells without a number, and skips rows without a step.

    Args:
        path: the file.
        cells: cells or JSON values (n,) of each signal and of the step, if the file has steps.
        labels: what messages call each column.
        is_row: bool (n,): rows to read.
        findings: collects the problems.
        line: line of each row (n,).
        index: row numbers (n,), or None if rows are numbered after they are merged.
    """
    columns = {
        name: _parse_column(path, name, column, labels[name], is_row, line, findings)
        for name, column in cells.items()
    }
    keep = is_row & np.isfinite(columns[STEP][0]) if STEP in columns else is_row
    signals = {name: column for name, column in columns.items() if name != STEP}
    with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
        values = {name: value[keep].astype(np.float32) for name, (value, _) in signals.items()}
    lines = np.asarray(line, np.int64)[keep]
    unknown = np.full(len(lines), -1)
    return Rows(
        index=unknown if index is None else np.asarray(index, np.int64)[keep],
        step=columns[STEP][0][keep] if STEP in columns else unknown * np.nan,
        values=values,
        logged={name: logged[keep] for name, (_, logged) in signals.items()},
        line=lines,
        source=path,
    )


def _parse_column(
    path: str,
    name: str,
    cells: Sequence[Any],
    label: str,
    is_row: np.ndarray,
    lines: Sequence[int],
    findings: Findings,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers, float64 (n,), and whether each was logged, bool (n,)."""
    effect = "the row is skipped" if name == STEP else f"the row is read without {name}"
    numbers, logged = np.full(len(cells), np.nan), np.zeros(len(cells), bool)
    problems: dict[int, object] = {}
    try:
        numbers[:], logged[:] = _parse_plain(cells)
    except (ValueError, OverflowError):
        for at in np.flatnonzero(is_row).tolist():
            try:
                number = parse_number(cells[at])
            except ValueError as error:
                problems[at] = error
            else:
                logged[at] = number is not None
                numbers[at] = np.nan if number is None else number
    if name == STEP:
        for at in np.flatnonzero(is_row & ~np.isfinite(numbers)).tolist():
            problems.setdefault(at, numbers[at] if logged[at] else "missing")
    for at, problem in problems.items():
        findings.problem(path, lines[at], f"{label}: {problem}: {effect}")
    return numbers, logged


def _parse_plain(cells: Sequence[Any]) -> tuple[list[float], list[bool]]:
    """Parses a column of plain numbers ten times as fast. Raises ValueError for other columns."""
    kinds = set(map(type, cells))
    if kinds == {str} and "_" not in "".join(cells):
        return [float(cell) if cell else np.nan for cell in cells], [cell != "" for cell in cells]
    if kinds <= {float, int, type(None)}:  # a bool is not a loss
        logged = [cell is not None for cell in cells]
        return [np.nan if cell is None else float(cell) for cell in cells], logged
    raise ValueError
