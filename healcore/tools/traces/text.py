"""Opens text files, compressed or not, in several encodings, and collects their numbers."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO, TextIO, cast

import numpy as np

from healcore import regular_file
from healcore.tools.traces.attempts import Log
from healcore.tools.traces.columns import Findings, TraceError
from healcore.tools.traces.names import STEP

_READ_ERRORS = (EOFError, zlib.error, OSError)
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


def open_text(path: str) -> TextIO:
    """Opens a file as UTF-8, with unchanged line ends. Invalid bytes become U+FFFD."""
    return io.TextIOWrapper(_open_bytes(path), "utf-8-sig", errors="replace", newline="")


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
        except _READ_ERRORS as error:
            findings.problem(path, number, _describe_damage(error))
            return
        if not text:
            return
        if too_long:
            findings.problem(path, number, f"the line is longer than {longest >> 20} MB: skipped")
        else:
            yield number, text


def read_text(path: str, findings: Findings, longest: int) -> str:
    """Returns the content of a file up to damage, or up to `longest` characters."""
    text = io.StringIO()
    with open_text(path) as file:
        try:
            while text.tell() < longest and (block := file.read(_HEAD_BYTES)):
                text.write(block)
        except _READ_ERRORS as error:
            line = text.getvalue().count("\n") + 1
            findings.problem(path, line, _describe_damage(error))
    return text.getvalue()


def _describe_damage(error: BaseException) -> str:
    """Returns a message for an error of `_READ_ERRORS`."""
    if isinstance(error, _BAD_GZIP):
        return f"the compressed data end or are damaged here ({error}): the rest is lost"
    return f"reading failed here ({error}): the rest is lost"


# -- numbers ---------------------------------------------------------------------------------------


def parse_number(value: Any) -> float | None:
    """Parses a cell or JSON value; returns None for no value. Raises ValueError for other text."""
    if value is None or type(value) is float:
        return value
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


class RowCollector:
    """Collects the numbers of a file's rows, and the problems of its cells.

    Args:
        path: the file.
        labels: what messages call each column, by signal and "step", if the file has steps.
        findings: collects the problems.
    """

    def __init__(self, path: str, labels: Mapping[str, str], findings: Findings) -> None:
        self._path, self._labels, self._findings = path, labels, findings
        self._line, self._index = array("q"), array("q")
        self._numbers = {name: array("d") for name in labels}
        self._logged = {name: bytearray() for name in labels}

    def add(self, cells: Iterable[Any], line: int, index: int = -1) -> None:
        """Adds a row of cells or JSON values in the order of the labels, unless it has no step."""
        numbers: list[float | None] = []
        is_row = True
        for (name, label), cell in zip(self._labels.items(), cells, strict=True):
            number: float | None = None
            problem: object = None
            try:
                number = parse_number(cell)
            except ValueError as error:
                problem = error
            effect = f"read without {name}"
            if name == STEP and (number is None or not math.isfinite(number)):
                is_row, effect = False, "skipped"
                problem = problem or ("missing" if number is None else number)
            if problem is not None:
                self._findings.problem(self._path, line, f"{label}: {problem}: the row is {effect}")
            numbers.append(number)
        if is_row:
            self._line.append(line)
            self._index.append(index)
            for name, number in zip(self._labels, numbers, strict=True):
                self._numbers[name].append(math.nan if number is None else number)
                self._logged[name].append(number is not None)

    def log(self, run: str | None = None, count: int | None = None) -> Log:
        """Returns the rows; `count` as for `make_log`."""
        numbers = {name: np.array(column) for name, column in self._numbers.items()}
        logged = {name: np.array(mask, bool) for name, mask in self._logged.items()}
        lines, index = np.array(self._line), np.array(self._index)
        return make_log(self._path, run, numbers, logged, lines, index, count, self._findings)


def make_log(
    path: str,
    run: str | None,
    numbers: Mapping[str, np.ndarray],
    logged: Mapping[str, np.ndarray],
    line: np.ndarray,
    index: np.ndarray,
    count: int | None,
    findings: Findings,
) -> Log:
    """Returns the rows of a file from float64 columns.

    `count` is the number of rows of the file, or None if rows are numbered after they are merged.
    """
    with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
        values = {name: each.astype(np.float32) for name, each in numbers.items() if name != STEP}
    return Log(
        path=path,
        run=run,
        index=None if count is None else index,
        step=numbers.get(STEP),
        values=values,
        logged={name: logged[name] for name in values},
        line=line,
        count=count or 0,
        findings=findings,
    )
