"""Reads CSV files."""

from __future__ import annotations

import csv
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.attempts import Log
from healcore.tools.traces.columns import STEP, Findings, TraceError
from healcore.tools.traces.names import is_step, normalize, resolve
from healcore.tools.traces.text import RowCollector, open_text, parse_number

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


class TableHeader(NamedTuple):
    """The columns of a table."""

    names: list[str]
    line: int
    """Line number of the header, from 1. Blank lines may precede the header."""


def read_header(path: str) -> TableHeader:
    """Reads the header. Raises TraceError if the first line is not a header."""
    with open_text(path) as file:
        number, line = next((at, line) for at, line in enumerate(file, 1) if line.strip())
    try:
        names = [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    if all(_is_number(name) for name in names):
        raise TraceError(
            f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
            "columns above it: step,loss,grad_norm"
        )
    return TableHeader(names, number)


def _is_number(cell: str) -> bool:
    try:
        return parse_number(cell) is not None
    except ValueError:
        return False


def read_tables(path: str, header: TableHeader, columns: Mapping[str, str]) -> list[Log]:
    """Reads the table of a file, or the runs in a W&B export.

    Raises TraceError if no table has a column with a known name.
    """
    runs = _find_runs(header.names)
    if runs is None:
        found, notes = resolve(header.names, columns)
        places = {name: header.names.index(column) for name, column in found.items()}
        return [_read_table(path, header, places, notes)]
    logs: list[Log] = []
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
        logs.append(_read_table(path, header, places, notes, run if len(runs) > 1 else None))
    if not logs:
        raise TraceError(reasons[0])
    logs[0].findings.notes += reasons
    return logs


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


def _read_table(
    path: str,
    header: TableHeader,
    columns: Mapping[str, int],
    notes: Sequence[str],
    run: str | None = None,
) -> Log:
    """Reads a table, or one run of a table; `columns` has the places of the step and the signals.

    With a `run`, rows without a signal are skipped, because they belong to other runs.
    """
    findings = Findings()
    findings.notes += notes
    log = _load_numbers(path, header, columns, run, findings)
    if log is not None:
        return log
    labels = {name: f"column '{header.names[at]}'" for name, at in columns.items()}
    collector = RowCollector(path, labels, findings)
    width = len(header.names)
    signals = [at for name, at in columns.items() if name != STEP]
    count = 0
    for line, cells in _rows(path, header, findings):
        count += 1
        if len(cells) < width or any(cells[width:]):
            if cells:
                plural = "s" if len(cells) > 1 else ""
                text = f"{len(cells)} cell{plural} where the header has {width}"
                findings.problem(path, line, f"{text}: the row is skipped")
        elif run is None or any(cells[at] for at in signals):
            collector.add([cells[at] for at in columns.values()], line, count - 1)
    return collector.log(run, count)


def _load_numbers(
    path: str,
    header: TableHeader,
    columns: Mapping[str, int],
    run: str | None,
    findings: Findings,
) -> Log | None:
    """Reads a table whose cells all are plain numbers, or returns None for any other table."""
    lines = array("q")

    def plain_lines(file: Iterator[str]) -> Iterator[str]:
        for number, line in enumerate(file, header.line + 1):
            if line.count(",") == len(header.names) - 1 and '"' not in line:
                lines.append(number)
                yield line
            elif line.strip():
                raise ValueError("a row with other cells")

    with open_text(path) as file:
        text = plain_lines(itertools.islice(file, header.line, None))
        places = tuple(columns.values())
        try:
            # loadtxt warns if there is no row.
            rows = itertools.chain([next(text)], text)
            table = np.loadtxt(rows, delimiter=",", usecols=places, comments=None, ndmin=2)
        except (ValueError, StopIteration):
            return None
    numbers = dict(zip(columns, table.T, strict=True))
    if len(table) != len(lines) or not np.isfinite(numbers.get(STEP, 0)).all():
        return None
    count = len(lines)
    logged = dict.fromkeys((name for name in columns if name != STEP), np.ones(count, bool))
    return Log(path, run, numbers, logged, np.array(lines), findings, np.arange(count), count)


def _rows(path: str, header: TableHeader, findings: Findings) -> Iterator[tuple[int, list[str]]]:
    """Yields the last line and the cells of every row, and reports damage.

    A row without cells is damaged. csv ends a cell after 131,072 characters, so that an open quote
    does not join the rest of the file to one row.
    """
    with open_text(path) as file:
        rows = csv.reader(itertools.islice(file, header.line, None))
        while True:
            try:
                cells = next(rows, None)
            except csv.Error as error:
                line = header.line + rows.line_num
                findings.problem(path, line, f"{error}: the row is skipped")
                yield line, []
                continue
            if cells is None:
                return
            if cells and (len(cells) > 1 or cells[0].strip()):  # a blank line is no row
                yield header.line + rows.line_num, cells
