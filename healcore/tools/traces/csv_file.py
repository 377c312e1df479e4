"""Reads CSV and similar tables, chunk by chunk."""

from __future__ import annotations

import csv
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.names import STEP, is_step, normalized, resolve
from healcore.tools.traces.text import number_of, numbered_lines, open_text, parsed_rows
from healcore.tools.traces.trace import CHUNK, Findings, Rows, TraceError

LONGEST = 1 << 20
"""Characters of the longest line that is read."""

_DELIMITERS = ",;\t"
_MOST_COLUMNS = 1 << 16
_MOST_RUNS = 4096
"""Most runs of one export, since each takes a pass over the file."""
# Columns of a W&B export that all runs share, in addition to the step.
_OF_ALL_RUNS = ("wall_time", "relative_time_process", "relative_time_wall", "created", "timestamp")
_KEPT = 400
"""Characters that are kept of a cell; a number has fewer."""
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


def open_tables(path: str, header: TableHeader, columns: Mapping[str, str]) -> list[TableReader]:
    """The table of a file, or the runs in a W&B export. TraceError if none has a known column."""
    runs = _runs_of(header.names)
    if runs is None:
        picks, notes = resolve(header.names, columns)
        places = {name: header.names.index(column) for name, column in picks.items()}
        return [TableReader(path, header, places, notes)]
    readers: list[TableReader] = []
    reasons: list[str] = []
    for run, metrics in runs.items():
        # --column may give the metric, or the whole title of one run's column.
        own = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        try:
            picks, notes = resolve(list(metrics), own)
        except TraceError as error:
            reasons.append(f"run '{run}': {error}")
            continue
        places = {name: metrics[metric] for name, metric in picks.items()}
        readers.append(TableReader(path, header, places, notes, run if len(runs) > 1 else None))
    if not readers:
        raise TraceError(reasons[0])
    readers[0].notes.extend(reasons)
    return readers


def _runs_of(names: list[str]) -> dict[str, dict[str, int]] | None:
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
        return number_of(cell) is not None
    except ValueError:
        return False


# -- rows ------------------------------------------------------------------------------------------


@dataclass(eq=False)
class TableReader:
    """One table, or one run of a table of several; `columns` is signal (or "step") -> place.

    With a `run`, rows without a signal are ignored: they belong to other runs.
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
        rows = self._rows(findings)
        while chunk := list(itertools.islice(rows, CHUNK)):
            line, index, read = zip(*chunk, strict=True)
            cells = dict(zip(self.columns, zip(*read, strict=True), strict=True))
            logs = np.ones(len(chunk), bool)
            if self.run is not None:
                signals = [column for name, column in cells.items() if name != STEP]
                logs = np.array([any(row) for row in zip(*signals, strict=True)])
            yield parsed_rows(self.path, cells, labels, logs, findings, line=line, index=index)

    def _rows(self, findings: Findings) -> Iterator[tuple[int, int, list[str]]]:
        """Line, row number and cells of the columns, of every row that has all cells."""
        self.rows_read = 0
        delimiter, width = self.header.delimiter, len(self.header.names)
        places = tuple(self.columns.values())
        pending: deque[tuple[int, str]] = deque()
        with open_text(self.path) as file:
            for _ in range(self.header.line):
                file.readline(LONGEST)
            lines = numbered_lines(
                self.path, file, findings, longest=LONGEST, after=self.header.line
            )

            def next_line() -> tuple[int, str] | None:
                return pending.popleft() if pending else next(lines, None)

            while line := next_line():
                number, record = line[0], [line]
                cells = _cells(record, delimiter)
                # A quoted cell may continue in the next lines.
                while cells is None and len(record) < _TALLEST and (line := next_line()):
                    record.append(line)
                    cells = _cells(record, delimiter)
                if cells is not None and (not cells or (len(cells) == 1 and not cells[0].strip())):
                    continue  # blank lines are no rows, as in pandas
                self.rows_read += 1
                if cells is None or (len(record) > 1 and len(cells) != width):
                    pending.extendleft(reversed(record[1:]))
                    problem = "a quote that is not closed"
                elif len(cells) < width or any(cells[width:]):
                    count = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
                    problem = f"{count} where the header has {width}"
                else:
                    picked = [cells[at] for at in places]
                    if delimiter != "," or len(record[0][1]) > _KEPT or len(record) > 1:
                        picked = [_number_text(cell, delimiter) for cell in picked]
                    yield number, self.rows_read - 1, picked
                    continue
                findings.problem(self.path, number, f"{problem}: the row is left out")


def _number_text(cell: str, delimiter: str) -> str:
    if delimiter != "," and cell.count(",") == 1 and "." not in cell:
        cell = cell.replace(",", ".")  # 3,14: where commas are decimal, ";" separates cells
    return cell[:_KEPT]


def _cells(record: Sequence[tuple[int, str]], delimiter: str) -> list[str] | None:
    """The cells of a row of one or more lines; None if its last quote is still open."""
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
