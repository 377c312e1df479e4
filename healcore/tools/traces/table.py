"""CSV and its relatives, chunk by chunk."""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TextIO

import numpy as np

from healcore.tools.traces.batch import Batch
from healcore.tools.traces.cells import from_text
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.header import LONGEST, Header
from healcore.tools.traces.names import STEP
from healcore.tools.traces.text import BROKEN, open_text, why_broken
from healcore.tools.traces.trace import CHUNK


class _Block(NamedTuple):
    """Some rows of the table, cell by cell."""

    line: list[int]
    row: list[int]
    cells: list[list[str]]


_CHUNK_CHARACTERS = 1 << 25
"""In memory at a time, with some ten bytes for each."""
_TALLEST = 16
"""Lines that one row may have. A quote that is never closed would take in the rest of the file."""


class TableReader:
    """One table, or one run of a table of several."""

    def __init__(
        self, path: str, header: Header, picks: Mapping[str, int], *, sparse: bool
    ) -> None:
        """Takes what the header says.

        Args:
            path: the file.
            header: see `read_header`.
            picks: signal (or "step") -> place of its column.
            sparse: leave out rows that log nothing: they are other runs' rows.
        """
        self.path = path
        self._header = header
        self._picks = dict(picks)
        self._sparse = sparse

    def batches(self, findings: Findings) -> Iterator[Batch]:
        """See `Reader`."""
        row = 0
        with open_text(self.path) as file:
            line = self._header.line
            for _ in range(line):
                file.readline(LONGEST)
            broken = False
            while not broken:
                lines: list[str] = []
                try:
                    lines.extend(self._bounded(file, line, findings))
                except BROKEN as error:
                    findings.problem(self.path, line + len(lines) + 1, why_broken(error))
                    broken = True
                if not lines:
                    return
                numbers = _all_numbers(lines, self._header.delimiter, len(self._header.names))
                if numbers is not None and self._has_steps(numbers):
                    batch = self._plain(numbers, line, row)
                    line, row = line + len(lines), row + len(lines)
                else:
                    block, line, row = self._block(lines, file, line, row, findings)
                    batch = self._parsed(block, row, findings)
                yield batch

    def _bounded(self, file: TextIO, line: int, findings: Findings) -> Iterator[str]:
        """The next `CHUNK` lines, fewer where they are long.

        One that has no end is told and comes as a blank one.
        """
        room = _CHUNK_CHARACTERS
        for number in range(line + 1, line + CHUNK + 1):
            text = file.readline(LONGEST)
            if not text:
                return
            length = len(text)
            if length == LONGEST and not text.endswith("\n"):
                why = f"the line is longer than {LONGEST >> 20} MB: left out"
                findings.problem(self.path, number, why)
                while text and not text.endswith("\n"):
                    text = file.readline(LONGEST)
                text = "\n"
            yield text
            room -= length
            if room < 0:
                return

    def _has_steps(self, numbers: np.ndarray) -> bool:
        return STEP not in self._picks or bool(np.isfinite(numbers[:, self._picks[STEP]]).all())

    def _plain(self, numbers: np.ndarray, line: int, row: int) -> Batch:
        count = len(numbers)
        names = [name for name in self._picks if name != STEP]
        with np.errstate(over="ignore"):
            values = {name: numbers[:, self._picks[name]].astype(np.float32) for name in names}
        step = numbers[:, self._picks[STEP]].copy() if STEP in self._picks else None
        return Batch(
            line=np.arange(line + 1, line + 1 + count),
            row=np.arange(row, row + count),
            end=row + count,
            step=step,
            values=values,
            given={name: np.ones(count, bool) for name in names},
        )

    def _block(
        self, lines: list[str], file: TextIO, line: int, row: int, findings: Findings
    ) -> tuple[_Block, int, int]:
        """Rows with as many cells as the header; the line and row numbers after them."""
        width = len(self._header.names)
        rows = _one_per_line(lines, self._header.delimiter, width)
        if rows is not None:
            count = len(rows)
            numbers = list(range(line + 1, line + 1 + count))
            return _Block(numbers, list(range(row, row + count)), rows), line + count, row + count
        block = _Block([], [], [])
        pending = deque(lines)
        done = 0
        while pending:
            here = line + done + 1
            record = [pending.popleft()]
            cells = _cells(record, self._header.delimiter)
            # A quoted cell may go on in the lines after these.
            while cells is None and len(record) < _TALLEST:
                try:
                    more = pending.popleft() if pending else file.readline(LONGEST)
                except BROKEN as error:
                    findings.problem(self.path, here, why_broken(error))
                    more = ""
                if not more:
                    break
                record.append(more)
                cells = _cells(record, self._header.delimiter)
            if cells is None or (len(record) > 1 and len(cells) != width):
                pending.extendleft(reversed(record[1:]))
                text = "a quote that is not closed: the row is left out"
                findings.problem(self.path, here, text)
                done, row = done + 1, row + 1
                continue
            done += len(record)
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue  # a blank line is no row, as in pandas
            if len(cells) == width or (len(cells) > width and not any(cells[width:])):
                block.line.append(here)
                block.row.append(row)
                block.cells.append(cells)
            else:
                count = f"{len(cells)} cell{'s' if len(cells) > 1 else ''}"
                text = f"{count} where the header has {width}: the row is left out"
                findings.problem(self.path, here, text)
            row += 1
        return block, line + done, row

    def _parsed(self, block: _Block, end: int, findings: Findings) -> Batch:
        columns: dict[str, np.ndarray] = {}
        given: dict[str, np.ndarray] = {}
        keep = np.ones(len(block.line), bool)
        for name, place in self._picks.items():
            cells = [row[place] for row in block.cells]
            columns[name], given[name] = self._column(name, cells, block.line, findings)
        step = None
        if STEP in self._picks:
            step, logged = columns.pop(STEP), given.pop(STEP)
            keep = np.isfinite(step)
            for at in np.flatnonzero(~keep & logged):
                text = f"step {step[at]}: the row is left out"
                findings.problem(self.path, block.line[at], text)
            step = step[keep]
        if self._sparse:
            logged = np.zeros(len(keep), bool)
            for flags in given.values():
                logged |= flags
            step = None if step is None else step[logged[keep]]
            keep &= logged
        with np.errstate(over="ignore"):
            values = {name: column[keep].astype(np.float32) for name, column in columns.items()}
        return Batch(
            line=np.array(block.line, np.int64)[keep],
            row=np.array(block.row, np.int64)[keep],
            end=end,
            step=step,
            values=values,
            given={name: flags[keep] for name, flags in given.items()},
        )

    def _column(
        self, name: str, cells: list[str], lines: list[int], findings: Findings
    ) -> tuple[np.ndarray, np.ndarray]:
        """float64 (n,) and which of them are numbers."""
        try:
            if "_" not in "".join(cells):
                numbers = [float(cell) if cell else np.nan for cell in cells]
                return np.array(numbers, np.float64), np.array([cell != "" for cell in cells], bool)
        except ValueError:
            pass
        found = np.full(len(cells), np.nan)
        given = np.zeros(len(cells), bool)
        for at, cell in enumerate(cells):
            if self._header.delimiter != "," and cell.count(",") == 1 and "." not in cell:
                cell = cell.replace(",", ".")  # 3,14: where commas are decimal, ";" parts cells
            try:
                number = from_text(cell)
            except ValueError as error:
                rest = "the row is left out" if name == STEP else f"the row is read without {name}"
                findings.problem(self.path, lines[at], f"{self._called(name)}: {error}: {rest}")
                continue
            if number is not None:
                found[at], given[at] = number, True
            elif name == STEP:
                text = f"{self._called(name)} is empty: the row is left out"
                findings.problem(self.path, lines[at], text)
        return found, given

    def _called(self, name: str) -> str:
        return f"column '{self._header.names[self._picks[name]]}'"


def _cells(record: list[str], delimiter: str) -> list[str] | None:
    """The cells of a row that may go over several lines; None: its last quote is still open."""
    try:
        rows = list(csv.reader(record, delimiter=delimiter, strict=True))
    except csv.Error as error:
        if len(record) > 1 or "unexpected end" in str(error):
            return None
        try:  # a quote in the middle of a cell is a character like any other
            rows = list(csv.reader(record, delimiter=delimiter))
        except csv.Error:
            return None
    return (rows[0] if rows else []) if len(rows) < 2 else None


def _one_per_line(lines: list[str], delimiter: str, width: int) -> list[list[str]] | None:
    """The cells of every line, where every line is one whole row; else None."""
    reader = csv.reader(lines, delimiter=delimiter)
    try:
        rows = list(reader)
    except csv.Error:
        return None
    whole = len(rows) == len(lines) and set(map(len, rows)) == {width}
    # A quote in the last line may be one that goes on in the next chunk.
    return rows if whole and '"' not in lines[-1] else None


def _all_numbers(lines: list[str], delimiter: str, width: int) -> np.ndarray | None:
    """float64 (lines, width) if every cell of every line is a number, else None.

    Measured on 500,000 rows of three columns: NumPy's reader 0.12 us a row, the csv module with
    float() 0.8 us, pandas in chunks 0.06 us. pandas is not worth a dependency for that, and it
    cannot name the line of a bad cell; NumPy cannot either, so that whatever it refuses goes to the
    csv module.
    """
    if not lines[0].strip():
        return None  # NumPy warns where there is nothing but blank lines
    try:
        numbers = np.loadtxt(lines, delimiter=delimiter, comments=None, ndmin=2, quotechar='"')
    except ValueError:
        return None
    # Blank lines are passed over without a word, which would put the line numbers out.
    return numbers if numbers.shape == (len(lines), width) else None
