"""Reads CSV files, and charts exported from Weights & Biases.

An exported chart has one column for the steps and a column "RUN - METRIC" for every run. The
columns "RUN - METRIC__MIN" and "RUN - METRIC__MAX" have the extremes of a bin and are not read.
"""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from healcore.tools.traces.columns import STEP, Log, Problem, TraceError
from healcore.tools.traces.names import is_step, normalize, resolve
from healcore.tools.traces.text import KNOWN_FORMATS, open_text, parse_number, parse_rows

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


def _read_header(path: str) -> TableHeader:
    """Reads the header. Raises TraceError if the first line is not a header."""
    with open_text(path) as file:
        number, line = next((at, line) for at, line in enumerate(file, 1) if line.strip())
    try:
        names = [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    try:
        numbers = list(map(parse_number, names))
    except ValueError:
        return TableHeader(names, number)
    if None in numbers:
        return TableHeader(names, number)
    raise TraceError(
        f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
        "columns above it: step,loss,grad_norm"
    )


def read_tables(path: str, columns: Mapping[str, str]) -> list[Log]:
    """Reads the table of a file, or the runs in a W&B export.

    Raises TraceError if the file is not a table, or no run has a column with a known name.
    """
    header = _read_header(path)
    if len(header.names) == 1 and not columns and header.names[0].lower() != "loss":
        raise TraceError(f"its first line is '{header.names[0][:60]}'. It is not {KNOWN_FORMATS}")
    table = _load_numbers(path, header)
    runs = _find_runs(header.names)
    logs: list[Log] = []
    reasons: list[str] = []
    for run, places in runs.items():
        # --column may name the metric, or the whole title of one run's column.
        metrics = [header.names[place].removeprefix(f"{run} - ") for place in places]
        chosen = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        try:
            found, notes = resolve(metrics, chosen)
        except TraceError as error:
            reasons.append(f"run '{run}': {error}" if run else str(error))
            continue
        used = {name: places[metrics.index(metric)] for name, metric in found.items()}
        notes = [f"{path}: {note}" for note in notes]
        title = run if len(runs) > 1 else None
        logs.append(_read_run(path, title, header, used, table, notes))
    if not logs:
        raise TraceError(reasons[0])
    logs[0].notes.extend(f"{path}: {reason}" for reason in reasons)
    return logs


def _find_runs(names: list[str]) -> dict[str | None, list[int]]:
    """Finds the places of each run's columns, including shared columns.

    Returns one run, None, for a table that is not an exported chart.
    """
    shared: list[int] = []
    runs: dict[str | None, list[int]] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            plain = normalize(name)
            if not (is_step(name) or plain in _SHARED_NAMES or plain.endswith("epoch")):
                return {None: list(range(len(names)))}
            shared.append(place)
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            runs.setdefault(run, []).append(place)
    if not runs:
        return {None: shared}
    return {run: [*shared, *own] for run, own in runs.items()}


def _load_numbers(path: str, header: TableHeader) -> np.ndarray | None:
    """Reads a table whose cells all are plain numbers, or returns None for any other table."""
    with open_text(path) as file, warnings.catch_warnings(action="error"):
        try:
            table = np.loadtxt(file, delimiter=",", skiprows=header.line, comments=None, ndmin=2)
        except (ValueError, UserWarning):  # a table without rows gives a warning
            return None
    return table if table.shape[1] == len(header.names) else None


def _read_run(
    path: str,
    run: str | None,
    header: TableHeader,
    places: Mapping[str, int],
    table: np.ndarray | None,
    notes: list[str],
) -> Log:
    """Reads a table, or one run of a table; `places` are those of the step and the signals.

    With a `run`, rows without a signal are skipped, because they belong to other runs.
    """
    if table is not None:
        numbers = {name: table[:, place] for name, place in places.items()}
        if np.isfinite(numbers.get(STEP, 0)).all():
            logged = {name: np.ones(len(table), bool) for name in places if name != STEP}
            return Log(path, run, numbers, logged, [], notes)
    labels = {name: f"column '{header.names[place]}'" for name, place in places.items()}
    signals = [place for name, place in places.items() if name != STEP]
    width = len(header.names)
    problems: list[Problem] = []

    def rows() -> Iterator[tuple[int, list[str]]]:
        for line, cells in _csv_rows(path, header, problems):
            if len(cells) < width or any(cells[width:]):
                plural = "s" if len(cells) > 1 else ""
                text = f"{len(cells)} cell{plural} where the header has {width}"
                problems.append((line, f"{text}: the row is skipped"))
            elif run is None or any(cells[place] for place in signals):
                yield line, [cells[place] for place in places.values()]

    return parse_rows(path, run, labels, rows(), problems, notes)


def _csv_rows(
    path: str, header: TableHeader, problems: list[Problem]
) -> Iterator[tuple[int, list[str]]]:
    """Yields the last line and the cells of every row, and adds damage to the problems.

    csv ends a cell after 131,072 characters, so that an open quote does not join the rest of the
    file to one row.
    """
    with open_text(path) as file:
        rows = csv.reader(itertools.islice(file, header.line, None))
        while True:
            try:
                cells = next(rows, None)
            except csv.Error as error:
                line = header.line + rows.line_num
                problems.append((line, f"{error}: the row is skipped"))
                continue
            if cells is None:
                return
            if cells and (len(cells) > 1 or cells[0].strip()):  # a blank line is no row
                yield header.line + rows.line_num, cells
