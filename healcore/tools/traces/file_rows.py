"""Defines the rows of one file, which readers make and `merge_rows` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.tools.traces.names import STEP
from healcore.tools.traces.trace import Findings

Column = tuple[np.ndarray, np.ndarray]
"""float64 (n,) numbers, and bool (n,): which of them were logged."""


class FileRows(NamedTuple):
    """Some rows of one file."""

    line: np.ndarray
    """int64 (n,): line numbers from 1; 0 if the format has no lines."""
    row: np.ndarray | None
    """int64 (n,): the file's own row numbers from 0 (CSV); None: rows are counted once merged."""
    end: int
    """With `row`: rows of the file up to here, including those left out; else rows of the chunk."""
    step: np.ndarray | None
    """float64 (n,), finite; None: the file has no steps."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) per signal, NaN where not given."""
    given: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Column],
        keep: slice | np.ndarray,
        *,
        line: np.ndarray,
        row: np.ndarray | None,
        end: int,
    ) -> FileRows:
        """The rows `keep` of some columns, one of which may be that of the steps."""
        signals = {name: column for name, column in columns.items() if name != STEP}
        with np.errstate(over="ignore"):  # 1e40 is an infinite float32, as it is in training
            values = {name: value[keep].astype(np.float32) for name, (value, _) in signals.items()}
        return cls(
            line[keep],
            None if row is None else row[keep],
            end,
            np.array(columns[STEP][0][keep]) if STEP in columns else None,
            values,
            {name: given[keep] for name, (_, given) in signals.items()},
        )


class LogReader(Protocol):
    """One file of a known format; it can be read repeatedly."""

    path: str

    def chunks(self, findings: Findings) -> Iterator[FileRows]:
        """The file from its beginning, at most `CHUNK` rows at a time."""
        ...


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
        row: Sequence[int] | None,
        end: int,
        sparse: bool = False,
    ) -> FileRows:
        """The rows that have a step, if the file has steps.

        `logs` is bool (n,): rows that are read. `sparse` leaves out rows without a signal. For
        `line`, `row` and `end` see `FileRows`.
        """
        columns = {
            name: self._column(name, column, logs, line, findings) for name, column in cells.items()
        }
        keep = logs
        if STEP in columns:
            keep = keep & np.isfinite(columns[STEP][0])
        if sparse:
            keep = keep & np.any([columns[name][1] for name in columns if name != STEP], axis=0)
        numbers = None if row is None else np.array(row, np.int64)
        return FileRows.of(columns, keep, line=np.array(line, np.int64), row=numbers, end=end)

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
