"""Reads CSV and similar tables in chunks."""

from __future__ import annotations

import csv
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.names import (
    PROBED,
    STEP,
    check_one_run,
    is_run,
    is_step,
    normalize,
    resolve,
)
from healcore.tools.traces.text import numbered_lines, open_text, parse_number, parse_rows
from healcore.tools.traces.trace import CHUNK, Findings, Rows, TraceError

MAX_LINE = 1 << 20
"""Largest number of characters in a line."""

_DELIMITERS = ",;\t"
_MAX_COLUMNS = 1 << 16
_MAX_RUNS = 4096
"""Largest number of runs in one export, because each run takes a pass over the file."""
# Columns of a W&B export that all runs share, in addition to the step.
_SHARED_NAMES = (
    "wall_time",
    "relative_time_process",
    "relative_time_wall",
    "created",
    "timestamp",
)
_MAX_CELL = 400
"""Number of characters of a cell that are kept; a number has fewer."""
_MAX_ROW_LINES = 16
"""Without this limit, an unclosed quote would join the rest of the file to one row."""


# -- header ----------------------------------------------------------------------------------------


class TableHeader(NamedTuple):
    """The columns of a table."""

    names: list[str]
    delimiter: str
    line: int
    """Line number of the header, from 1. Blank lines may precede the header."""


def read_header(path: str) -> TableHeader:
    """Reads the header. Raises TraceError if the file has none."""
    with open_text(path) as file:
        line, number = "", 0
        while not line.strip():
            line, number = file.readline(MAX_LINE), number + 1
            if not line:
                raise TraceError("it is empty")
    if len(line) == MAX_LINE:
        raise TraceError("its first line is longer than a megabyte: this is not a table")
    try:
        split = {sign: next(csv.reader([line], delimiter=sign)) for sign in _DELIMITERS}
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    delimiter = max(split, key=lambda sign: len(split[sign]))
    cells = split[delimiter]
    if len(cells) > _MAX_COLUMNS:
        raise TraceError(f"it has {len(cells):,} columns. At most {_MAX_COLUMNS:,} are read")
    names = [cell.strip() for cell in cells]
    if all(_is_number(name) for name in names):
        raise TraceError(
            f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
            "columns above it: step,loss,grad_norm"
        )
    return TableHeader(names, delimiter, number)


def open_tables(path: str, header: TableHeader, columns: Mapping[str, str]) -> list[TableReader]:
    """Opens the table of a file, or the runs in a W&B export.

    Raises TraceError if no table has a column with a known name.
    """
    runs = _find_runs(header.names)
    if runs is None:
        for name in filter(is_run, header.names):
            reader = TableReader(path, header, {name: header.names.index(name)}, [])
            rows = itertools.islice(reader.rows(Findings()), PROBED)
            check_one_run(name, [cells[0] for *_, cells in rows], columns)
        found, notes = resolve(header.names, columns)
        places = {name: header.names.index(column) for name, column in found.items()}
        return [TableReader(path, header, places, notes)]
    readers: list[TableReader] = []
    reasons: list[str] = []
    for run, metrics in runs.items():
        # --column may name the metric, or the whole title of one run's column.
        chosen = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        try:
            found, notes = resolve(list(metrics), chosen)
        except TraceError as error:
            reasons.append(f"run '{run}': {error}")
            continue
        places = {name: metrics[metric] for name, metric in found.items()}
        readers.append(TableReader(path, header, places, notes, run if len(runs) > 1 else None))
    if not readers:
        raise TraceError(reasons[0])
    readers[0].notes.extend(reasons)
    return readers


def _find_runs(names: list[str]) -> dict[str, dict[str, int]] | None:
    """Finds the runs in a chart exported from Weights & Biases.

    Such a table has one column for the steps and a column "RUN - METRIC" for every run. The columns
    "RUN - METRIC__MIN" and "RUN - METRIC__MAX" have the extremes of a bin and are not read.

    Returns:
        By run, the places of the shared columns and of its own columns, or None for other tables.

    Raises:
        TraceError: the table has too many runs.
    """
    shared: dict[str, int] = {}
    runs: dict[str, dict[str, int]] = {}
    copies: dict[str, int] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            plain = normalize(name)
            if not (is_step(name) or plain in _SHARED_NAMES or plain.endswith("epoch")):
                return None
            shared[name] = place
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            copies[name] = copy = copies.get(name, 0) + 1
            title = run if copy == 1 else f"{run} ({copy})"  # two runs with one name
            runs.setdefault(title, {}).setdefault(metric, place)
    if len(runs) > _MAX_RUNS or len(runs) * len(shared) > 1 << 20:
        raise TraceError(f"it has {len(runs):,} runs. At most {_MAX_RUNS:,} are read")
    return {run: {**shared, **own} for run, own in runs.items()} if runs else None


def _is_number(cell: str) -> bool:
    try:
        return parse_number(cell) is not None
    except ValueError:
        return False


# -- rows ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TableReader:
    """Reads a table, or one run of a table; `columns` has the places of the step and the signals.

    With a `run`, rows without a signal are skipped, because they belong to other runs.
    """

    path: str
    header: TableHeader
    columns: Mapping[str, int]
    notes: list[str]
    run: str | None = None
    rows_read: int = 0

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """See `LogReader`."""
        labels = {name: f"column '{self.header.names[at]}'" for name, at in self.columns.items()}
        rows = self.rows(findings)
        while chunk := list(itertools.islice(rows, CHUNK)):
            line, index, texts = zip(*chunk, strict=True)
            cells = dict(zip(self.columns, zip(*texts, strict=True), strict=True))
            is_row = np.ones(len(chunk), bool)
            if self.run is not None:
                signals = [column for name, column in cells.items() if name != STEP]
                is_row = np.array([any(row) for row in zip(*signals, strict=True)])
            yield parse_rows(self.path, cells, labels, is_row, findings, line=line, index=index)

    def rows(self, findings: Findings) -> Iterator[tuple[int, int, list[str]]]:
        """Yields line, row number and cells of the columns for every complete row."""
        self.rows_read = 0
        delimiter, width = self.header.delimiter, len(self.header.names)
        places = tuple(self.columns.values())
        pending: deque[tuple[int, str]] = deque()
        with open_text(self.path) as file:
            for _ in range(self.header.line):
                file.readline(MAX_LINE)
            lines = numbered_lines(
                self.path, file, findings, longest=MAX_LINE, after=self.header.line
            )

            def next_line() -> tuple[int, str] | None:
                return pending.popleft() if pending else next(lines, None)

            while line := next_line():
                number, record = line[0], [line]
                cells = _split_cells(record, delimiter)
                # A quoted cell may continue on the next lines.
                while cells is None and len(record) < _MAX_ROW_LINES and (line := next_line()):
                    record.append(line)
                    cells = _split_cells(record, delimiter)
                if cells is not None and (not cells or (len(cells) == 1 and not cells[0].strip())):
                    continue  # a blank line is no row, as in pandas
                self.rows_read += 1
                if cells is None or (len(record) > 1 and len(cells) != width):
                    pending.extendleft(reversed(record[1:]))
                    problem = "an unclosed quote"
                elif len(cells) < width or any(cells[width:]):
                    count = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
                    problem = f"{count} where the header has {width}"
                else:
                    picked = [cells[at] for at in places]
                    if delimiter != "," or len(record[0][1]) > _MAX_CELL or len(record) > 1:
                        picked = [_number_text(cell, delimiter) for cell in picked]
                    yield number, self.rows_read - 1, picked
                    continue
                findings.problem(self.path, number, f"{problem}: the row is skipped")


def _number_text(cell: str, delimiter: str) -> str:
    if delimiter != "," and cell.count(",") == 1 and "." not in cell:
        cell = cell.replace(",", ".")  # 3,14: tables with decimal commas use ";"
    return cell[:_MAX_CELL]


def _split_cells(record: Sequence[tuple[int, str]], delimiter: str) -> list[str] | None:
    """Splits the lines of a row into cells. Returns None if the last quote is still open."""
    lines = [text for _, text in record]
    if len(lines) == 1 and '"' not in lines[0]:
        return lines[0].rstrip("\r\n").split(delimiter)
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        if len(lines) > 1 or "unexpected end" in str(error):
            return None
        try:  # a quote in the middle of a cell is an ordinary character
            rows = list(csv.reader(lines, delimiter=delimiter))
        except csv.Error:
            return None
    return (rows[0] if rows else []) if len(rows) < 2 else None
