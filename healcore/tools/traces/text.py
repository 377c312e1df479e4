"""Opens text files, compressed or not, in several encodings; parses the numbers in their cells."""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO, cast

import numpy as np

from healcore import regular_file
from healcore.tools.traces.names import STEP
from healcore.tools.traces.trace import Findings, Rows, TraceError

Column = tuple[np.ndarray, np.ndarray]
"""float64 (n,) numbers, and bool (n,): which of them were logged."""

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


# -- columns ---------------------------------------------------------------------------------------


def rows_of_columns(
    columns: Mapping[str, Column],
    keep: slice | np.ndarray,
    path: str,
    *,
    line: Sequence[int] | np.ndarray,
    index: Sequence[int] | np.ndarray | None,
) -> Rows:
    """The rows `keep` of some columns of a file, one of which may be that of the steps.

    `index` are the file's own row numbers, or None if rows are counted once merged.
    """
    signals = {name: column for name, column in columns.items() if name != STEP}
    with np.errstate(over="ignore"):  # 1e40 is an infinite float32, as it is in training
        values = {name: value[keep].astype(np.float32) for name, (value, _) in signals.items()}
    lines = np.asarray(line, np.int64)[keep]
    none = np.full(len(lines), -1)
    return Rows(
        index=none if index is None else np.asarray(index, np.int64)[keep],
        step=np.array(columns[STEP][0][keep]) if STEP in columns else none * np.nan,
        values=values,
        given={name: given[keep] for name, (_, given) in signals.items()},
        line=lines,
        source=path,
    )


@dataclass(eq=False)
class CellParser:
    """Parses cells into numbers, and reports those that are not numbers.

    `labels` are the columns' names in messages. `fast` parses a whole column of plain numbers, or
    raises ValueError or OverflowError. `parse` parses one cell (None: nothing was logged), or
    raises ValueError.
    """

    path: str
    labels: Mapping[str, str]
    fast: Callable[[Sequence[Any]], Column]
    parse: Callable[[Any], float | None]

    def rows(
        self,
        cells: Mapping[str, Sequence[Any]],
        logs: np.ndarray,
        findings: Findings,
        *,
        line: Sequence[int],
        index: Sequence[int] | None = None,
        sparse: bool = False,
    ) -> Rows:
        """The rows that have a step, if the file has steps.

        `logs` is bool (n,): rows that are read. `sparse` leaves out rows without a signal. For
        `line` and `index` see `rows_of_columns`.
        """
        columns = {
            name: self._column(name, column, logs, line, findings) for name, column in cells.items()
        }
        keep = logs
        if STEP in columns:
            keep = keep & np.isfinite(columns[STEP][0])
        if sparse:
            keep = keep & np.any([columns[name][1] for name in columns if name != STEP], axis=0)
        return rows_of_columns(columns, keep, self.path, line=line, index=index)

    def _column(
        self,
        name: str,
        cells: Sequence[Any],
        logs: np.ndarray,
        lines: Sequence[int],
        findings: Findings,
    ) -> Column:
        lost = "the row is left out" if name == STEP else f"the row is read without {name}"

        def report(at: int, why: object) -> None:
            findings.problem(self.path, lines[at], f"{self.labels[name]}: {why}: {lost}")

        no_numbers: set[int] = set()
        try:
            found, given = self.fast(cells)
        except (ValueError, OverflowError):
            found, given = np.full(len(cells), np.nan), np.zeros(len(cells), bool)
            for at in np.flatnonzero(logs).tolist():
                try:
                    number = self.parse(cells[at])
                except ValueError as error:
                    report(at, error)
                    no_numbers.add(at)
                    continue
                if number is not None:
                    found[at], given[at] = number, True
        if name == STEP:
            for at in np.flatnonzero(logs & ~np.isfinite(found)).tolist():
                if at not in no_numbers:
                    report(at, found[at] if given[at] else "missing")
        return found, given
