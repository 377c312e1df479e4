"""Reads the cells of one log as whole columns.

Each reader of a format yields lines and cells, and `parse_rows` makes a `RawLog` of them: numbers
for the step and the signals, and a problem for each cell that is no number.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from healcore import regular_file
from healcore.console import counted
from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "eval_loss")
"""Columns that are read from a log: signals of `healcore.core.signals`."""

STEP, EPOCH = "step", "epoch"

EPOCH_LENGTH = "epoch_length"
"""Number of batches in an epoch, where a log counts its steps within each epoch."""

JUDGED_SIGNALS = ("loss", "grad_norm")
"""A row can be judged if it has one of these signals. Only these signals show where a run was
resumed."""

KNOWN_FORMATS = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, console output "
    "that names the numbers, a TensorBoard event file, or healcore's own metrics"
)
_HEAD_BYTES = 1 << 20
"""Number of bytes from which the format of a file is recognized."""
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""
_MAX_UNUSABLE = 0.1
"""Largest fraction of the lines of a column that may be unusable in a log that is judged."""
_ABBREVIATED = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([kKMBGT])\s*")
"""A number such as "12K": its whole part, its decimals and its unit."""
_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
BLOCK = 4096
"""Rows that are parsed as columns, if their cells are plain numbers."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy.

    For example, two columns may each be the loss, or no column has a known name. One unreadable
    file does not end a command: `open_traces` returns the reason together with the other traces.
    """


class UnjudgeableLog(TraceError):
    """A log can be read, but too little of it to judge the run.

    For example, a fifth of the cells of the loss are damaged. A run that diverged in these rows
    would look healthy in the other rows.
    """


class RowProblem(NamedTuple):
    """Content of a file that could not be used, with its place.

    Commands print problems with the path of the file, so that a user can look at the line.
    """

    line: int
    """Line from 1, or 0 in a format without lines."""
    text: str
    """Description."""
    unusable: bool = False
    """Whether the line may have had a loss or a norm. A log with many such lines is not judged."""


class RawLog(NamedTuple):
    """The rows of one file, or of one run in a file, as written.

    A reader of a format makes raw logs. `join_logs` makes the trace of a run from the raw logs of
    all its files. All arrays have one value for each row.
    """

    path: str
    """Path of the file."""
    run: str | None
    """Name of the run in a file with several runs, or None."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal, "epoch", "epoch_length" and "step", if the file has steps, which are
    finite."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[RowProblem]
    """Lines and cells that could not be used."""
    notes: list[str]
    """Remarks about usable content, each with the path."""

    @property
    def rows(self) -> int:
        """Number of rows n, the length of each array."""
        return len(next(iter(self.logged.values())))


def read_head(path: str) -> bytes:
    """Reads the start of a file, from which the format of the file is recognized.

    Args:
        path: a regular file. Another kind of file, such as a pipe, could block the read forever.

    Returns:
        The first megabyte of the content.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(_HEAD_BYTES)


def open_text(path: str) -> TextIO:
    """Opens a log as text. One damaged byte does not make the other lines unreadable.

    Args:
        path: a regular file, with or without a byte order mark.

    Returns:
        The open file, decoded as UTF-8. Line ends are unchanged, because csv needs them, and
        invalid bytes become U+FFFD.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    return open(
        path, encoding="utf-8-sig", errors="replace", newline="", opener=regular_file.opener
    )


def parse_number(value: Any) -> float | None:
    """Parses a cell of a table, or a value of a JSON record.

    Args:
        value: a text, a number or None. A text may be abbreviated, such as "12.5K".

    Returns:
        The number, which may be NaN or infinity, or None for a text such as "" or "N/A".

    Raises:
        ValueError: the value is not a number, for example a text with words, or a bool.
    """
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
        if short := _ABBREVIATED.fullmatch(value):
            return float(f"{short[1]}.{short[2] or 0}") * _UNITS[short[3]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            if value > 0:
                return math.inf
            return -math.inf
    raise ValueError(f"{quote_excerpt(str(value))} is not a number")


def quote_excerpt(text: str) -> str:
    """Quotes the start of a damaged text for a message.

    Args:
        text: a text of any length, with any characters.

    Returns:
        At most 40 characters of the text with quotes. Control characters are escaped, so that a
        file cannot change the colours of a terminal.
    """
    if len(text) > 40:
        text = f"{text[:37]}..."
    return repr(text)


def parse_rows(
    path: str,
    run: str | None,
    labels: Mapping[str, str],
    rows: Iterable[tuple[int, Sequence[Any]]],
    problems: list[RowProblem],
    notes: list[str],
) -> RawLog:
    """Parses the cells of a file, and adds damaged cells to its problems.

    Args:
        path: the file, for messages.
        run: name of the run in a file with several runs, or None.
        labels: what problems call each column, by signal and "step", if the file has steps.
        rows: the line and the cells or JSON values of each row, in the order of the labels. A row
            without a finite step is skipped.
        problems: the problems that the reader of the file has found. The reader adds more while it
            yields rows. The list is changed in place.
        notes: remarks on the file.

    Returns:
        The log. Its problems are in the order of the lines.

    Raises:
        UnjudgeableLog: more than a tenth of the lines of a column cannot be used.
    """
    columns = Columns(labels, problems)
    remaining = iter(rows)
    while True:
        before = len(problems)
        block = list(itertools.islice(remaining, BLOCK))
        # The reader has added its own problems while it yielded the block. They are put between
        # the problems of the rows, in the order of the lines.
        of_reader = problems[before:]
        columns.damaged[""] += [each for each in of_reader if each.unusable]
        if not block:
            break
        if columns.add_plain([cells for _, cells in block]):
            continue
        del problems[before:]
        for line, cells in block:
            while of_reader and of_reader[0].line < line:
                problems.append(of_reader.pop(0))
            columns.add_row(line, cells)
        problems += of_reader
    arrays = {name: np.array(column) for name, column in columns.numbers.items()}
    masks = {name: np.array(mask, bool) for name, mask in columns.logged.items()}
    for name, found in columns.damaged.items():
        usable = len(arrays[min(arrays)])
        if name in masks:
            usable = int(masks[name].sum())
        _refuse_unusable(found, usable)
    if STEP in arrays and any(columns.units):
        arrays[STEP] = _spread_rounded_steps(arrays[STEP], np.array(columns.units))
        notes = [*notes, f"{path}: {ROUNDED}"]
    return RawLog(path, run, arrays, masks, problems, notes)


class Columns:
    """The columns of a log while its rows are parsed. Arguments as for `parse_rows`."""

    def __init__(self, labels: Mapping[str, str], problems: list[RowProblem]) -> None:
        self.labels = labels
        self.problems = problems
        self.numbers: dict[str, array[float]] = {}
        self.logged: dict[str, bytearray] = {}
        for name in labels:
            self.numbers[name] = array("d")
            if name in SIGNALS:
                self.logged[name] = bytearray()
        self.units = array("d")
        """Rounding of each step: 1000 for "1K", 0 for an exact step."""
        self.damaged: dict[str, list[RowProblem]] = {
            "": [each for each in problems if each.unusable]
        }

    def add_plain(self, rows: Sequence[Sequence[Any]]) -> bool:
        """Adds rows as whole columns, which takes a fraction of the time of row after row.

        Args:
            rows: the cells of at most `BLOCK` rows, in the order of the labels.

        Returns:
            False if a cell is no plain number and not empty, or a step is not finite. Then no row
            was added, and `add_row` has to add each of them.
        """
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, cells in zip(self.labels, zip(*rows, strict=True), strict=True):
            column = plain_column(cells)
            if column is None or (name == STEP and not np.isfinite(column[0]).all()):
                return False
            found[name] = column
        for name, (numbers, logged) in found.items():
            self.numbers[name].frombytes(numbers.tobytes())
            if name in SIGNALS:
                self.logged[name] += logged.tobytes()
            if name == STEP:
                self.units.frombytes(bytes(numbers.nbytes))
        return True

    def add_row(self, line: int, cells: Sequence[Any]) -> None:
        """Adds a row, and what is damaged in it to the problems.

        Args:
            line: line of the row in the file, or 0 in a format without lines.
            cells: the cells or JSON values, in the order of the labels. A row whose step is
                missing or damaged is not added. A damaged cell of a signal counts as not logged.
        """
        labels = self.labels
        values: dict[str, float | None] = {}
        placeholders: list[str] = []  # names of the columns in which the program printed N/A
        for (name, label), cell in zip(labels.items(), cells, strict=True):
            number: float | None = None
            problem: object = None
            try:
                if name == STEP:
                    number = parse_number(_before_slash(cell))
                else:
                    number = parse_number(cell)
            except ValueError as error:
                problem = error
            if name == STEP and (number is None or not math.isfinite(number)):
                if problem is None:
                    problem = number
                    if number is None:
                        problem = "missing"
                text = f"{label}: {problem}: the row is skipped"
                # A line without a step and a loss is no step of the run, such as the mean of an
                # epoch in another column.
                of_row = dict(zip(labels, cells, strict=True))
                value = of_row.get("loss", of_row.get("grad_norm"))
                self._add_damage(name, RowProblem(line, text, unusable=value not in (None, "")))
                return
            if problem is not None and name in SIGNALS:
                text = f"{label}: {problem}: the row is read without {name}"
                self._add_damage(name, RowProblem(line, text, unusable=name in JUDGED_SIGNALS))
            if _is_placeholder(cell):
                placeholders.append(name)
            values[name] = number
        if placeholders and all(values.get(name) is None for name in JUDGED_SIGNALS):
            text = f"{labels[placeholders[0]]}: N/A: the row has neither a loss nor a norm"
            name = placeholders[0]
            self._add_damage(name, RowProblem(line, text, unusable=name != "eval_loss"))
        for (name, number), cell in zip(values.items(), cells, strict=True):
            if name in SIGNALS:
                self.logged[name].append(number is not None)
            if name == STEP:
                self.units.append(_rounding(cell))
            if number is None:
                number = math.nan
            self.numbers[name].append(number)

    def _add_damage(self, name: str, problem: RowProblem) -> None:
        """Adds a problem of the column `name`."""
        self.problems.append(problem)
        if problem.unusable:
            self.damaged.setdefault(name, []).append(problem)


def plain_column(cells: Sequence[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Parses cells as `parse_number` does, if all are numbers or all texts of numbers, or empty.

    Args:
        cells: the n cells of a column.

    Returns:
        The numbers, float64 (n,), NaN for no value; and whether there is a value, bool (n,). None
        for any other cells.
    """
    kinds = set(map(type, cells))
    try:
        if kinds <= {float, int}:
            return np.array(cells, np.float64), np.ones(len(cells), bool)
        if kinds <= {float, int, type(None)}:
            empty = None
        elif kinds == {str} and "_" not in "".join(cells):
            empty = ""
        else:
            return None
        numbers = [math.nan if cell == empty else float(cell) for cell in cells]
    except (ValueError, OverflowError):
        return None
    return np.array(numbers, np.float64), np.array([cell != empty for cell in cells], bool)


ROUNDED = (
    "its steps are rounded (1K, 2.5M): rows with the same number are spread evenly up to the next"
)


def _is_placeholder(cell: Any) -> bool:
    """Whether a program printed N/A in place of a number. An empty cell is just not logged."""
    return isinstance(cell, str) and cell.strip().lower() == "n/a"


def _before_slash(cell: Any) -> Any:
    """The step in a text like "10/1000"."""
    if not isinstance(cell, str):
        return cell
    step, slash, length = cell.partition("/")
    if slash and step.strip().isdecimal() and length.strip().isdecimal():
        return step
    return cell


def _rounding(cell: Any) -> float:
    """The unit to which a text is rounded: 1000 for "1K", 100 for "1.2K", 0 for an exact number."""
    if not isinstance(cell, str):
        return 0.0
    short = _ABBREVIATED.fullmatch(cell)
    if short is None:
        return 0.0
    decimals = len(short[2] or "")
    return _UNITS[short[3]] / 10**decimals


def _spread_rounded_steps(step: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Spreads rows with the same rounded step evenly up to the next number.

    The rows stay distinct and in order, and each is less than a unit from its step.
    """
    spread = step.copy()
    edges = [0, *(1 + np.flatnonzero(np.diff(step))).tolist(), len(step)]
    for start, stop in itertools.pairwise(edges):
        if unit[start] and stop - start > 1:
            gap = unit[start]
            if stop < len(step) and 0 < step[stop] - step[start] <= unit[start]:
                gap = step[stop] - step[start]
            spread[start:stop] += np.arange(stop - start) * gap // (stop - start)
    return spread


def _refuse_unusable(problems: Sequence[RowProblem], usable: int) -> None:
    """Raises UnjudgeableLog if more than a tenth of the lines, and more than one, are unusable.

    One line alone is the usual end of a run that was killed while it wrote.
    """
    count = len(problems)
    if count > 1 and count > _MAX_UNUSABLE * (count + usable):
        first = min(problems, key=operator.itemgetter(0))
        where = "first: "
        if first.line:
            where = f"first in line {first.line}: "
        raise UnjudgeableLog(
            f"{count:,} of {counted(count + usable, 'line')} cannot be used, {where}{first.text}. "
            "Write plain numbers (1234.5) and a header above rows with other columns, or name "
            "another column (--column loss=NAME)"
        )
