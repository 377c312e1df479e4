"""Reads CSV and similar tables, chunk by chunk."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

import numpy as np

from healcore.tools.traces.names import STEP, is_step, normalized
from healcore.tools.traces.text import (
    BROKEN,
    CellParser,
    Column,
    number_in_text,
    open_text,
    rows_of_columns,
    skip_line,
    why_broken,
)
from healcore.tools.traces.trace import CHUNK, Findings, Rows, TraceError

LONGEST = 1 << 20
"""Characters of the longest line that is read."""

_DELIMITERS = ",;\t"
_MOST_COLUMNS = 1 << 16
_MOST_RUNS = 4096
"""Most runs of one export, since each takes a pass over the file."""
# Columns of a W&B export that all runs share, besides the step.
_OF_ALL_RUNS = ("wall_time", "relative_time_process", "relative_time_wall", "created", "timestamp")
_CHUNK_CHARACTERS = 1 << 25
"""Characters read at a time; each takes about ten bytes of memory."""
_TALLEST = 16
"""Most lines of one row. A quote that is never closed would take in the rest of the file."""


# -- header ----------------------------------------------------------------------------------------


class TableHeader(NamedTuple):
    """The columns of a table."""

    names: list[str]
    delimiter: str
    line: int
    """Its line number, from 1: blank lines may come before it."""


def read_header(path: str) -> TableHeader:
    """Finds the header; TraceError if there is none."""
    with open_text(path) as file:
        line, number = "", 0
        while not line.strip():
            line, number = file.readline(LONGEST), number + 1
            if not line:
                raise TraceError("it is empty")
    if len(line) == LONGEST:
        raise TraceError("its first line has no end within a megabyte: this is not a table")
    try:
        read = {sign: next(csv.reader([line], delimiter=sign)) for sign in _DELIMITERS}
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    delimiter = max(read, key=lambda sign: len(read[sign]))
    cells = read[delimiter]
    if len(cells) > _MOST_COLUMNS:
        raise TraceError(f"it has {len(cells):,} columns. At most {_MOST_COLUMNS:,} are read")
    names = [cell.strip() for cell in cells]
    if all(_is_number(name) for name in names):
        raise TraceError(
            f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
            "columns above it: step,loss,grad_norm"
        )
    return TableHeader(names, delimiter, number)


def runs_of(names: list[str]) -> dict[str, dict[str, int]] | None:
    """The runs of a chart exported from Weights & Biases, or None for any other table.

    Such a table has one column for the steps, and for every run "RUN - METRIC" with its extremes
    over a bin in "RUN - METRIC__MIN" and "RUN - METRIC__MAX", which are not read. Returns for every
    run its own and the common columns: metric -> place. Raises TraceError if it has too many runs.
    """
    common: dict[str, int] = {}
    runs: dict[str, dict[str, int]] = {}
    copies: dict[str, int] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            plain = normalized(name)
            if not (is_step(name) or plain in _OF_ALL_RUNS or plain.endswith("epoch")):
                return None
            common[name] = place
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            copies[name] = copy = copies.get(name, 0) + 1
            title = run if copy == 1 else f"{run} ({copy})"  # two runs of one name
            runs.setdefault(title, {}).setdefault(metric, place)
    if len(runs) > _MOST_RUNS or len(runs) * len(common) > 1 << 20:
        raise TraceError(f"it has {len(runs):,} runs. At most {_MOST_RUNS:,} are read")
    return {run: {**common, **own} for run, own in runs.items()} if runs else None


def _is_number(cell: str) -> bool:
    try:
        return number_in_text(cell) is not None
    except ValueError:
        return False


# -- rows ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TableReader:
    """One table, or one run of a table of several; `columns` is signal (or "step") -> place.

    `sparse` leaves out rows without a signal, which are other runs' rows.
    """

    path: str
    header: TableHeader
    columns: Mapping[str, int]
    sparse: bool
    rows_read: int = 0

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """See `LogReader`."""
        self.rows_read = 0
        with open_text(self.path) as file:
            line = self.header.line
            for _ in range(line):
                file.readline(LONGEST)
            broken = False
            while not broken:
                lines: list[str] = []
                try:
                    lines.extend(self._next_lines(file, line, findings))
                except BROKEN as error:
                    findings.problem(self.path, line + len(lines) + 1, why_broken(error))
                    broken = True
                if not lines:
                    return
                numbers = _all_numbers(lines, self.header.delimiter, len(self.header.names))
                step = self.columns.get(STEP)
                if numbers is not None and (step is None or np.isfinite(numbers[:, step]).all()):
                    chunk = self._of_numbers(numbers, line)
                    line += len(lines)
                else:
                    chunk, line = self._of_lines(lines, file, line, findings)
                yield chunk

    def _next_lines(self, file: TextIO, line: int, findings: Findings) -> Iterator[str]:
        """`CHUNK` lines, fewer if they are long. One without an end is reported and made blank."""
        room = _CHUNK_CHARACTERS
        for number in range(line + 1, line + CHUNK + 1):
            text = file.readline(LONGEST)
            if not text:
                return
            length = len(text)
            if length == LONGEST and not text.endswith("\n"):
                why = f"the line is longer than {LONGEST >> 20} MB: left out"
                findings.problem(self.path, number, why)
                skip_line(file)
                text = "\n"
            yield text
            room -= length
            if room < 0:
                return

    def _of_numbers(self, numbers: np.ndarray, line: int) -> Rows:
        places = np.arange(len(numbers))
        given = np.ones(len(numbers), bool)
        columns = {name: (numbers[:, place], given) for name, place in self.columns.items()}
        index = places + self.rows_read
        self.rows_read += len(numbers)
        return rows_of_columns(columns, slice(None), self.path, line=places + line + 1, index=index)

    def _of_lines(
        self, lines: list[str], file: TextIO, line: int, findings: Findings
    ) -> tuple[Rows, int]:
        """Rows with as many cells as the header, and the number of the last line."""
        rows = _one_per_line(lines, self.header.delimiter, len(self.header.names))
        if rows is not None:
            places = [(line + 1 + at, self.rows_read + at) for at in range(len(rows))]
            line, self.rows_read = line + len(rows), self.rows_read + len(rows)
        else:
            places, rows = [], []
            pending = deque(lines)
            while pending:
                here = line + 1
                cells, count = self._next_row(pending, file, here, findings)
                line += count
                if cells is None:
                    self.rows_read += 1
                elif cells and (len(cells) > 1 or cells[0].strip()):  # as in pandas
                    if self._fits(cells, here, findings):
                        places.append((here, self.rows_read))
                        rows.append(cells)
                    self.rows_read += 1
        columns = {name: [cells[at] for cells in rows] for name, at in self.columns.items()}
        labels = {name: f"column '{self.header.names[at]}'" for name, at in self.columns.items()}
        chunk = CellParser(self.path, labels, _plain_column, self._number).rows(
            columns,
            np.ones(len(rows), bool),
            findings,
            line=[number for number, _ in places],
            index=[number for _, number in places],
            sparse=self.sparse,
        )
        return chunk, line

    def _next_row(
        self, pending: deque[str], file: TextIO, line: int, findings: Findings
    ) -> tuple[list[str] | None, int]:
        """The cells of a row (None: it cannot be read), and how many lines it has."""
        record = [pending.popleft()]
        cells = _cells(record, self.header.delimiter)
        # A quoted cell may continue in the next lines.
        while cells is None and len(record) < _TALLEST:
            try:
                more = pending.popleft() if pending else file.readline(LONGEST)
            except BROKEN as error:
                findings.problem(self.path, line, why_broken(error))
                more = ""
            if not more:
                break
            record.append(more)
            cells = _cells(record, self.header.delimiter)
        if cells is None or (len(record) > 1 and len(cells) != len(self.header.names)):
            pending.extendleft(reversed(record[1:]))
            text = "a quote that is not closed: the row is left out"
            findings.problem(self.path, line, text)
            return None, 1
        return cells, len(record)

    def _fits(self, cells: list[str], line: int, findings: Findings) -> bool:
        width = len(self.header.names)
        if len(cells) == width or (len(cells) > width and not any(cells[width:])):
            return True
        count = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
        text = f"{count} where the header has {width}: the row is left out"
        findings.problem(self.path, line, text)
        return False

    def _number(self, cell: str) -> float | None:
        if self.header.delimiter != "," and cell.count(",") == 1 and "." not in cell:
            cell = cell.replace(",", ".")  # 3,14: where commas are decimal, ";" separates cells
        return number_in_text(cell)


def _plain_column(cells: Sequence[str]) -> Column:
    if "_" in "".join(cells):
        raise ValueError
    numbers = [float(cell) if cell else np.nan for cell in cells]
    return np.array(numbers, np.float64), np.array([cell != "" for cell in cells], bool)


def _cells(record: list[str], delimiter: str) -> list[str] | None:
    """The cells of a row of one or more lines; None: its last quote is still open."""
    try:
        rows = list(csv.reader(record, delimiter=delimiter, strict=True))
    except csv.Error as error:
        if len(record) > 1 or "unexpected end" in str(error):
            return None
        try:  # a quote in the middle of a cell is an ordinary character
            rows = list(csv.reader(record, delimiter=delimiter))
        except csv.Error:
            return None
    return (rows[0] if rows else []) if len(rows) < 2 else None


def _one_per_line(lines: list[str], delimiter: str, width: int) -> list[list[str]] | None:
    """The cells of every line if every line is one whole row, else None."""
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        rows = list(reader)
    except csv.Error:
        return None
    whole = len(rows) == len(lines) and set(map(len, rows)) == {width}
    # A quoted cell of the last line may continue in the next chunk.
    return rows if whole and '"' not in lines[-1] else None


def _all_numbers(lines: list[str], delimiter: str, width: int) -> np.ndarray | None:
    """float64 (lines, width) if every cell of every line is a number, else None.

    Per row of three columns, over 500,000 rows: NumPy's reader 0.12 us, the csv module with float()
    0.8 us, pandas in chunks 0.06 us. pandas is not worth a dependency for that, and neither it nor
    NumPy can name the line of a bad cell, so the csv module reads what NumPy refuses.
    """
    if not lines[0].strip():
        return None  # NumPy warns if all lines are blank
    try:
        numbers = np.loadtxt(lines, delimiter=delimiter, comments=None, ndmin=2, quotechar='"')
    except ValueError:
        return None
    # NumPy skips blank lines silently, which would shift the line numbers.
    return numbers if numbers.shape == (len(lines), width) else None
